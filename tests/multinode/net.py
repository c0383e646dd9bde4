"""A network of its own: each place is a network and mount namespace, joined to a router that can drop, refuse or slow what it forwards.

Namespaces have no names and nothing is made in the caller's own: each lives as long as a keeper process that waits for the end of its
standard input, and what runs in it is killed with the caller. A test run that is killed leaves nothing behind either.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket as sockets
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
COMMAND_S = 20
CLONE_NEWNET = 0x40000000
Refusal = Literal["blackhole", "unreachable"]
_SUBNET = "10.77"
_KEEPER = """set -e
ip link set lo up
if [ -n "$1" ]; then mount --bind "$1" /etc/hosts; fi
if [ -n "$2" ]; then echo 1 > /proc/sys/net/ipv4/ip_forward; echo 0 > /proc/sys/net/ipv4/icmp_ratelimit; fi
echo up
exec cat"""


def why_not() -> str:
    """What keeps this machine from making such networks; empty if nothing does."""
    if os.geteuid() != 0:
        return "it takes root to make network namespaces"
    missing = [name for name in ("ip", "tc", "unshare", "nsenter", "setpriv", "mount") if shutil.which(name) is None]
    if missing:
        return f"there is no {', '.join(missing)} here: install iproute2 and util-linux"
    try:
        with Keeper(router=True) as keeper:
            keeper.ip("link add name a type veth peer name b", "rule add from 10.77.1.2 blackhole")
            keeper.run("tc", "qdisc", "add", "dev", "a", "root", *_tbf(1000))
    except OSError as error:
        return f"the kernel, or the container this runs in, does not let us: {error}"
    return ""


def _tbf(kbit: int) -> tuple[str, ...]:
    """A token bucket that sends so many kbit/s, whole segments offloaded to the interface included, and queues a second's worth."""
    return "tbf", "rate", f"{kbit}kbit", "burst", "64kb", "latency", "1s"


class Keeper:
    """A process that holds a pair of namespaces; they go with it, and it goes with us."""

    def __init__(self, *, hosts: Path | None = None, router: bool = False) -> None:
        command = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", _KEEPER, "sh"]
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen([*command, str(hosts or ""), "1" if router else ""], stdin=pipe, stdout=pipe, stderr=pipe)
        assert self._popen.stdout is not None
        if self._popen.stdout.readline() != b"up\n":
            assert self._popen.stderr is not None
            reason = self._popen.stderr.read().decode().strip()
            self.close()
            raise OSError(f"no namespace: {reason}")
        self.pid = self._popen.pid

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The namespaces go once their last process has ended."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._popen.wait(COMMAND_S)
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            stream.close()

    def inside(self, *command: str) -> list[str]:
        """The command line that runs this there. It replaces itself by the command, so process ids are what they seem."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--", *command]

    def run(self, *command: str, text: str = "") -> None:
        """Runs a short command there. Raises OSError with what it said."""
        done = subprocess.run(self.inside(*command), input=text, capture_output=True, text=True, timeout=COMMAND_S)
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")

    def ip(self, *lines: str) -> None:
        """Several `ip` commands in one process."""
        self.run("ip", "-batch", "-", text="".join(f"{line}\n" for line in lines))


@dataclass(frozen=True, slots=True)
class Place:
    """A host on the network."""

    name: str
    number: int
    keeper: Keeper

    @property
    def address(self) -> str:
        return f"{_SUBNET}.{self.number}.2"

    def popen(self, command: Sequence[str], *, log: Path, environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Starts a process here, to be killed if we die. Its output is appended to log. Call it from a thread that lives on."""
        line = self.keeper.inside("setpriv", "--pdeathsig", "KILL", "--", "env", "-C", str(ROOT), *command)
        with log.open("ab") as out:
            return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(environ or os.environ))

    def socket(self) -> sockets.socket:
        """A TCP socket of this place, for use anywhere in this process."""
        return self.some_sockets(1)[0]

    def some_sockets(self, count: int) -> list[sockets.socket]:
        """So many. Raises OSError."""
        made: list[sockets.socket] = []
        failed: list[OSError] = []

        def make() -> None:  # the thread enters the namespace and ends there
            try:
                _enter_network(self.keeper.pid)
                made.extend(sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM) for _ in range(count))
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=make, name=f"into-{self.name}")
        thread.start()
        thread.join()
        if failed:
            for each in made:
                each.close()
            raise failed[0]
        return made

    def connect(self, address: str, port: int, *, timeout: float) -> sockets.socket:
        """A connection from here. Raises OSError."""
        made = self.socket()
        made.settimeout(timeout)
        try:
            made.connect((address, port))
        except OSError:
            made.close()
            raise
        return made


def _enter_network(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{pid}/ns/net").open("rb") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


class Network:
    """Places around a router. Faults are of the router: no process notices but by what does not come."""

    def __init__(self, folder: Path) -> None:
        """folder: for the file that is /etc/hosts in all places."""
        self._hosts = folder / "hosts"
        self._hosts.write_text("127.0.0.1 localhost\n")
        self._router = Keeper(router=True)
        self._places: dict[str, Place] = {}

    def close(self) -> None:
        """Ends it; what still runs in a place is cut off."""
        for place in self._places.values():
            place.keeper.close()
        self._router.close()

    def place(self, name: str) -> Place:
        """The place of this name; made when first asked for."""
        if name not in self._places:
            self._places[name] = self._make(name, len(self._places) + 1)
        return self._places[name]

    def _make(self, name: str, number: int) -> Place:
        keeper = Keeper(hosts=self._hosts)
        place = Place(name, number, keeper)
        gate, port = f"{_SUBNET}.{number}.1", f"to{number}"
        try:
            self._router.ip(
                f"link add name {port} type veth peer name eth0 netns {keeper.pid}", f"addr add {gate}/24 dev {port}", f"link set {port} up"
            )
            keeper.ip(f"addr add {place.address}/24 dev eth0", "link set eth0 up", f"route add default via {gate}")
        except OSError:
            keeper.close()
            raise
        return place

    def names(self, names: Mapping[str, Sequence[Place]]) -> None:
        """From now on a name means these places, everywhere in the network."""
        lines = ["127.0.0.1 localhost", *(f"{place.address} {name}" for name, places in names.items() for place in places)]
        with self._hosts.open("r+") as file:  # the same file: it is mounted
            file.write("".join(f"{line}\n" for line in lines))
            file.truncate()

    def cut(self, place: Place, *, to: bool = True, back: bool = True, how: Refusal = "blackhole") -> None:
        """Forwards nothing to a place, from it ("back"), or both: silently, or saying that it cannot be reached."""
        self._router.ip(*(f"rule add {way} {place.address} prio {place.number} {how}" for way in _ways(to=to, back=back)))

    def slow(self, place: Place, *, kbit: int) -> None:
        """Makes its link as slow as that, both ways."""
        self._router.run("tc", "qdisc", "replace", "dev", f"to{place.number}", "root", *_tbf(kbit))
        place.keeper.run("tc", "qdisc", "replace", "dev", "eth0", "root", *_tbf(kbit))

    def heal(self, place: Place) -> None:
        """As it was made."""
        with contextlib.suppress(OSError):  # none was cut
            while True:
                self._router.ip(f"rule del prio {place.number}")
        for keeper, device in ((self._router, f"to{place.number}"), (place.keeper, "eth0")):
            with contextlib.suppress(OSError):  # it was not slow
                keeper.run("tc", "qdisc", "del", "dev", device, "root")


def _ways(*, to: bool, back: bool) -> Iterator[str]:
    if to:
        yield "to"
    if back:
        yield "from"


@contextlib.contextmanager
def network(folder: Path) -> Iterator[Network]:
    """A network that goes with the block."""
    made = Network(folder)
    try:
        yield made
    finally:
        made.close()
