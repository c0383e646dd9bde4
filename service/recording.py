"""Recordings of how a model's experts are used: what `colibri record` writes, and what the planner and simulations read.

JSON lines. The first is the header; each other one is a window, the time since the line before. A window has either all of a load's counts
(service.load, under the same names) or, if nothing was routed in it, none.

    {"colibri_recording": 1, "model": "mixtral", "layers": 32, "experts": 8, "top_k": 2, "expert_bytes": 176160768, "interval_seconds": 1.0,
     "started": "2026-01-31T12:00:00Z", "places": [[[0], [1, 0], ...], ...]}
    {"at": 1.0, "seconds": 1.0, "tokens": [[17, 4, ...], ...], "active": [[9, 4, ...], ...], "steps": [20, ...], ...}
    {"at": 2.0, "seconds": 1.0}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from engine_c import RUN_BUCKETS
from service.load import COUNTS, EXPERT_COUNTS, Load, together

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

VERSION = 1
_MARK = "colibri_recording"
_MOST_LAYERS, _MOST_EXPERTS = 4096, 65536
_MOST = 1 << 63  # counts are below, and their sums
_MOST_EXPERT_BYTES = 1 << 40
_MOST_NODE = (1 << 16) - 1
_LONGEST_LINE = 64 << 20  # bytes
_LONGEST = 1e12  # seconds


class RecordingError(ValueError):
    """A file is no recording, or a damaged one; the sentence names file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What was recorded."""

    model: str
    layers: int
    experts: int  # of each layer
    top_k: int  # experts of a token
    expert_bytes: int  # of the weights of one expert
    interval_seconds: float  # that was asked for
    started: str  # UTC, as ISO 8601 writes it
    # [layers][experts]: nodes that held the expert then, its home first (none: it was cut over nodes); empty: no expert was whole on a node
    places: tuple[tuple[tuple[int, ...], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two lines; `at`: its end, in seconds since the start."""

    at: float
    load: Load


@dataclass(frozen=True, slots=True)
class Recording:
    """All of a file. `torn`: what was wrong with its last line, which was left out; "" if nothing was."""

    header: Header
    windows: tuple[Window, ...]
    torn: str = ""

    def total(self, *, last: float | None = None) -> Load:
        """The load of all windows, or of those that end in the last so many seconds. Raises RecordingError if there are none."""
        end = self.windows[-1].at if self.windows else 0.0
        chosen = [window.load for window in self.windows if last is None or window.at > end - last]
        if not chosen:
            raise RecordingError("the recording has no window: record for longer than its interval")
        for name in COUNTS:
            if sum(int(getattr(load, name).max()) for load in chosen) >= _MOST:
                raise RecordingError(f"the recording's windows add up to {name} of more than {_MOST - 1}, which no server counts")
        return together(chosen)


def header_line(header: Header) -> bytes:
    """With its line feed."""
    return _line({_MARK: VERSION} | asdict(header))


def window_line(window: Window) -> bytes:
    """With its line feed."""
    fields: dict[str, object] = {"at": round(window.at, 3), "seconds": round(window.load.seconds, 3)}
    if not window.load.idle:
        fields |= {name: getattr(window.load, name).tolist() for name in COUNTS}
    return _line(fields)


def _line(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Reads a whole recording. A last line without its end, of a recorder that was killed, is left out; RecordingError for anything else
    that is not as it should be, OSError if the file can't be read."""
    name = os.fspath(path)
    with open(path, "rb") as file:
        lines = _lines(file, name)
        number, first, ended = next(lines, (1, b"", False))
        if not ended:
            raise RecordingError(f"{name}: line 1 is no whole header; is it a file that `colibri record` wrote?")
        header = _Reader(f"{name}: line {number}", first).header()
        windows: list[Window] = []
        for number, line, ended in lines:
            if not ended:
                return Recording(header, tuple(windows), f"{name}: line {number} has no end and was left out")
            window = _Reader(f"{name}: line {number}", line).window(header)
            if windows and window.at < windows[-1].at:
                raise RecordingError(f"{name}: line {number}: at is {window.at}, before the line above")
            windows.append(window)
    return Recording(header, tuple(windows))


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[int, bytes, bool]]:
    """(number, line, whether it has its end)."""
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE:
            raise RecordingError(f"{name}: line {number} is longer than {_LONGEST_LINE >> 20} MiB; did `colibri record` write that file?")
        yield number, line, line.endswith(b"\n")


class _Reader:
    """The fields of one line, each checked."""

    def __init__(self, where: str, line: bytes) -> None:
        self._where = where
        try:
            fields = json.loads(line, parse_constant=self._no_number)
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"it is no JSON ({error})") from error
        if not isinstance(fields, dict):
            raise self._wrong("it is no JSON object")
        self._fields: dict[str, Any] = fields

    def header(self) -> Header:
        version = self._fields.pop(_MARK, None)
        if version is None:
            raise self._wrong("it is no header; is it a file that `colibri record` wrote?")
        if version != VERSION:
            raise self._wrong(f"it is of version {version!r:.20}; this program reads version {VERSION}")
        layers, experts = self._whole("layers", 1, _MOST_LAYERS), self._whole("experts", 1, _MOST_EXPERTS)
        header = Header(
            model=self._text("model"),
            layers=layers,
            experts=experts,
            top_k=self._whole("top_k", 1, experts),
            expert_bytes=self._whole("expert_bytes", 0, _MOST_EXPERT_BYTES),
            interval_seconds=self._number("interval_seconds"),
            started=self._text("started"),
            places=self._places(layers, experts),
        )
        self._done()
        return header

    def window(self, header: Header) -> Window:
        at, seconds = self._number("at"), self._number("seconds")
        idle = not self._fields
        counts = {name: self._counts(name, header, idle=idle) for name in COUNTS}
        self._done()
        return Window(at, Load(seconds=seconds, **counts))

    def _counts(self, name: str, header: Header, *, idle: bool) -> npt.NDArray[np.uint64]:
        import numpy as np

        columns = header.experts if name in EXPERT_COUNTS else RUN_BUCKETS if name == "runs" else 0
        shape = (header.layers, columns) if columns else (header.layers,)
        if idle:
            return np.zeros(shape, np.uint64)
        rows = self._list(name, self._take(name), header.layers)
        for row in rows if columns else [rows]:
            self._check_counts(name, self._list(name, row, columns) if columns else row)
        return np.array(rows, np.uint64).reshape(shape)

    def _check_counts(self, name: str, values: Sequence[object]) -> None:
        for value in values:
            if type(value) is not int or not 0 <= value < _MOST:
                raise self._wrong(f"{name} has {value!r:.40}, which is no count")

    def _places(self, layers: int, experts: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        places = self._take("places")
        if places == []:
            return ()
        rows = [self._list("places", row, experts) for row in self._list("places", places, layers)]
        for nodes in (nodes for row in rows for nodes in row):
            if not isinstance(nodes, list) or len(set(map(str, nodes))) != len(nodes):
                raise self._wrong(f"places has {nodes!r:.40}, which is no list of nodes")
            self._check_counts("places", nodes)
            if max(nodes, default=0) > _MOST_NODE:
                raise self._wrong(f"places has {max(nodes)!r:.40}; nodes have numbers up to {_MOST_NODE}")
        return tuple(tuple(tuple(nodes) for nodes in row) for row in rows)

    def _list(self, name: str, value: object, length: int) -> list[Any]:
        if not isinstance(value, list) or len(value) != length:
            raise self._wrong(f"{name} is no list of {length}" + (f" but of {len(value)}" if isinstance(value, list) else ""))
        return value

    def _whole(self, name: str, least: int, most: int) -> int:
        value = self._take(name)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(f"{name} is {value!r:.40}; it must be a whole number between {least} and {most}")
        return value

    def _number(self, name: str) -> float:
        value = self._take(name)
        if type(value) not in (int, float) or not 0 <= value < _LONGEST:
            raise self._wrong(f"{name} is {value!r:.40}; it must be a number of seconds")
        return float(value)

    def _text(self, name: str) -> str:
        value = self._take(name)
        if not isinstance(value, str):
            raise self._wrong(f"{name} is {value!r:.40}; it must be a text")
        return value

    def _take(self, name: str) -> Any:
        if name not in self._fields:
            raise self._wrong(f"{name} is missing")
        return self._fields.pop(name)

    def _done(self) -> None:
        if self._fields:
            raise self._wrong(f"{next(iter(self._fields))[:40]!r} means nothing in a recording of version {VERSION}")

    def _no_number(self, text: str) -> float:
        raise ValueError(f"{text} is no number")

    def _wrong(self, what: str) -> RecordingError:
        return RecordingError(f"{self._where}: {what}")
