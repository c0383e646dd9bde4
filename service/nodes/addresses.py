"""Where nodes are looked for: a list of addresses, a name with an address for each node, or a file with a list that is read anew."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from dataclasses import dataclass

_DNS = "dns:///"
_FILE = "file:"
_SHOWN = 64  # characters of what is wrong in a file
_LONGEST, _MOST = 65536, 1024  # characters and addresses of a list


class AddressError(ValueError):
    """What is wrong with the setting, as a sentence."""


@dataclass(frozen=True, slots=True)
class Place:
    """A host by name or number, and a port."""

    host: str
    port: int

    @property
    def local(self) -> bool:
        """Whether it is this machine, by its own address for itself."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_places(text: str) -> tuple[tuple[Place, ...], bool]:
    """The places in "dns:///nodes:50061" or "a:50061,b:50061", and whether each stands for all addresses of its name; none of a file.
    AddressError."""
    if file_of(text):
        return (), False
    by_name = text.startswith(_DNS)
    words = [text.removeprefix(_DNS)] if by_name else [word.strip() for word in text.split(",")]
    return tuple(dict.fromkeys(_parse(word, text) for word in words)), by_name


def file_of(text: str) -> str:
    """The path in "file:nodes.txt"; "" if it is no file."""
    return text.removeprefix(_FILE) if text.startswith(_FILE) else ""


def read_places(path: str) -> tuple[tuple[Place, ...], str]:
    """The places in a file, between commas or on lines, comments (#) left out; or why there are none, with the remedy. One wrong word
    spoils the list."""
    remedy = "write HOST:PORT,HOST:PORT into it; it is read again and again"
    try:
        with open(path, encoding="ascii", opener=_open_file) as file:
            text = file.read(_LONGEST + 1)
    except OSError as error:
        return (), f"the list of nodes {path} cannot be read ({error.strerror}): {remedy}"
    except UnicodeDecodeError:
        return (), f"the list of nodes {path} is not plain text: {remedy}"
    words = [word for word in re.split(r"[\s,]+", re.sub(r"#.*", "", text)) if word]
    if len(text) > _LONGEST or len(words) > _MOST:
        return (), f"the list of nodes {path} is too long: at most {_MOST} addresses and {_LONGEST} characters are read; shorten it"
    places: dict[Place, None] = {}
    for word in words:
        place = _place(word)
        if place is None:
            return (), f"the list of nodes {path} says {word[:_SHOWN]!r}, which is no HOST:PORT: {remedy}"
        places[place] = None
    return tuple(places), "" if places else f"the list of nodes {path} is empty: {remedy}"


def _open_file(path: str, flags: int) -> int:
    """Refuses what is no file; a FIFO would be waited for and a device read for ever."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is no regular file")


def _parse(word: str, text: str) -> Place:
    place = _place(word)
    if place is None:
        raise AddressError(f"{word!r} of {text!r} is no HOST:PORT; give dns:///NAME:PORT, HOST:PORT,HOST:PORT or file:PATH")
    return place


def _place(word: str) -> Place | None:
    host, _, port = word.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    fit = host.isprintable() and not set(host) & {"/", " "}
    return Place(host, int(port)) if host and fit and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536 else None


def resolve(places: tuple[Place, ...], *, by_name: bool) -> tuple[tuple[Place, ...], str]:
    """All addresses there are at this moment, ascending, and why a name has none, in a sentence. Waits for the name service."""
    if not by_name:
        return places, ""
    found: set[Place] = set()
    trouble = ""
    for place in places:
        try:
            answers = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        except OSError as error:
            trouble = f"the name {place.host} does not resolve ({error.strerror})"
            continue
        found |= {Place(str(answer[4][0]), place.port) for answer in answers}
    return tuple(sorted(found, key=str)), trouble
