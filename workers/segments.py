"""The model's bytes as descriptors that every process maps: the file itself, or sealed copies in memory, one a NUMA node, on huge pages."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal, Self

from engine_c import Part
from workers.copying import Copying
from workers.filling import FillError, NodeShare
from workers.keeping import Keep, kept_extents
from workers.layout import Layout, LayoutError, header_end, read_digest, read_layout
from workers.parts import filled_up, overlay, write_table
from workers.placement import Extent, Placement, PlacementPlan, fine_extents, placement_nodes, plan_placement, whole_file
from workers.topology import Topology, read_topology

log = logging.getLogger("colibri.workers")

LoadMode = Literal["auto", "map", "memfd"]

_MAPPED = "the file is mapped, so its pages lie wherever they were read"
_TOO_LARGE = f"a copy would take more than half of the free memory, so {_MAPPED}"
RESERVE = 64 << 20
"""Memory that must stay free beside a copy of the model."""


class SegmentError(RuntimeError):
    """The model's file can't be opened or copied; says why and what to do."""


@dataclass(frozen=True, slots=True)
class PlacementReport:
    """Where the weights are. degraded says, each once, what the machine refused."""

    shares: tuple[NodeShare, ...] = ()
    degraded: tuple[str, ...] = ()


@dataclass(slots=True)
class ModelImage:
    """A container's bytes, `bytes` of them, in one or several descriptors. Close it after the models and workers opened from it.

    Its copies may still be in the making (open_image with complete=False): until complete() has returned the header and the descriptor are
    there, which is all that opening needs, and nothing may be computed.
    """

    mode: Literal["map", "memfd"]
    bytes: int
    placement: PlacementPlan
    report: PlacementReport = field(default_factory=PlacementReport)
    path: str | os.PathLike[str] = ""
    digest: str = ""
    """workers.layout.read_digest of the file that was opened, which another may since have replaced by name; "" if it is no container."""
    layout: Layout | None = None
    """Where the matrices lie, if it was needed to place them."""
    filled: tuple[Extent, ...] = ()
    """The extents as they were filled: no huge page reaches across two."""
    replicas: dict[int, dict[int, Part]] = field(default_factory=dict)
    """By node and offset: copies of single experts, which processes on that node map in place of the expert itself."""
    kept: tuple[Extent, ...] | None = None
    """The extents of which there are copies, if not of everything: the rest is mapped from the file."""
    writable: dict[int, int] = field(default_factory=dict)
    """Of an image whose copies change (workers.growing): by node, what they are written through."""
    _file: int = -1  # its descriptor then
    _by_node: dict[int, int] = field(default_factory=dict)  # node -> descriptor; -1: of no node in particular
    _tables: dict[int, int] = field(default_factory=dict)
    _copying: Copying | None = None

    @property
    def fds(self) -> tuple[int, ...]:
        """Every descriptor that holds bytes of the model."""
        return (*self._by_node.values(), *([] if self._file < 0 else [self._file]))

    @property
    def file(self) -> int:
        """The descriptor of the model's file, of an image that maps it or has copies of a share."""
        return self._by_node[-1] if self._file < 0 else self._file

    @property
    def kept_bytes(self) -> int:
        """Bytes of `bytes` that there are copies of, or that are mapped if there are none."""
        return self.bytes if self.kept is None else sum(extent.bytes for extent in self.kept)

    @property
    def huge_bytes(self) -> int:
        """Bytes on huge pages."""
        return sum(share.huge_bytes for share in self.report.shares)

    def parts_for(self, node: int | None) -> tuple[Part, ...]:
        """What a process that computes on a node (None: it does not matter) maps: with copies on several nodes, that node's own."""
        replicas = self.replicas.get(-1 if node is None else node, {})
        return overlay(self.base_parts(node), tuple(replicas.values()))

    def base_parts(self, node: int | None) -> tuple[Part, ...]:
        """The same without copies of single experts. A part's node is the one it was put on when the model was loaded."""
        extents = self.placement.extents if self.kept is None else self.kept
        copies = tuple(self.copy_of(extent) for extent in extents if self.is_for(extent, node))
        if self.kept is None:
            return copies
        if not self.writable:
            return filled_up(copies, [Part(self._file, -1, 0, self.bytes)])
        # A model's homes are what its parts say when it is opened: what may be copied later has the node it will be put on.
        rest = [Part(self._file, e.node, e.offset, e.bytes) for e in self.placement.extents if self.is_for(e, node)]
        return filled_up(copies, rest)

    def copy_of(self, extent: Extent) -> Part:
        """Where the copy of a piece of an extent is."""
        return Part(self._by_node[extent.node], extent.node, extent.offset, extent.bytes)

    def is_for(self, extent: Extent, node: int | None) -> bool:
        """Whether processes on a node read this copy."""
        home = self._home(node)
        return home is None or extent.node == home

    def keep(self, kept: tuple[Extent, ...] | None) -> None:
        """Processes started from now on map these copies, ascending, and the file for the rest."""
        self.kept = kept
        tables, self._tables = self._tables, {}
        for table in tables.values():
            os.close(table)

    def add_replica(self, node: int, part: Part) -> None:
        """Processes started on a node from now on map a copy; its descriptor becomes the image's."""
        self.replicas.setdefault(node, {})[part.offset] = part
        self._forget_table(node)

    def end_replica(self, node: int, offset: int) -> None:
        """They no longer do."""
        os.close(self.replicas[node].pop(offset).fd)
        self._forget_table(node)

    def _forget_table(self, node: int) -> None:
        table = self._tables.pop(node, None)
        if table is not None:
            os.close(table)

    def table_fd(self, node: int | None) -> int:
        """The descriptor of a sealed list of parts_for(node) (workers.parts); it stays the image's."""
        home = self._home(node)
        key = (-1 if home is None else home) if node not in self.replicas else node
        if key not in self._tables:
            self._tables[key] = write_table(self.parts_for(node))
        return self._tables[key]

    def node_at(self, offset: int) -> int:
        """The node on which a byte was placed; -1: on none in particular."""
        extents = self.placement.extents if self.kept is None else self.kept
        return next((extent.node for extent in extents if extent.offset <= offset < extent.offset + extent.bytes), -1)

    def _home(self, node: int | None) -> int | None:
        """The node whose copy is used, None if there is one copy for all."""
        if self.placement.placement != "replicate":
            return None
        return node if node in self.placement.nodes else self.placement.nodes[0]

    @property
    def pending(self) -> int:
        """Bytes of the copies that are still to be made."""
        return 0 if self._copying is None else self._copying.pending

    def complete(self) -> None:
        """Waits until the copies are whole and sealed. SegmentError: they can't be had, and the image is to be closed."""
        copying, self._copying = self._copying, None
        if copying is None:
            return
        with _telling(self.path):
            self.report = PlacementReport(*copying.complete())

    def close(self) -> None:
        """Gives the descriptors back, and calls off what is still being copied; a second call does nothing."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.stop()
        copies = [part.fd for own in self.replicas.values() for part in own.values()]
        fds = [*self.fds, *self.writable.values(), *self._tables.values(), *copies]
        self._by_node, self.writable, self._tables, self.replicas, self._file = {}, {}, {}, {}, -1
        for fd in fds:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_image(
    path: str | os.PathLike[str],
    *,
    mode: LoadMode = "map",
    placement: Placement = "auto",
    available: int | None = None,
    topology: Topology | None = None,
    keep: Keep | None = None,
    complete: bool = True,
) -> ModelImage:
    """Opens a model for sharing. "map": the file, through the page cache. "memfd": copies that nobody can change or resize any more, placed
    on the nodes, on huge pages where the kernel can. "auto": copies, which decode faster, if they take at most half of the free memory or a
    placement is asked for, else the file.

    keep: copies have only that; all else is mapped from the file, as everything is where no copy is made.
    complete: return when the copies are whole; else the caller waits for that (ModelImage.complete).
    available overrides what the machine and its control groups leave, in bytes. SegmentError if the file can't be read or the copies do not
    fit, PlacementError if the placement can't be had.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO is refused later, not waited for
    except OSError as refusal:
        raise SegmentError(f"{path}: {refusal.strerror}") from refusal
    size = os.fstat(fd).st_size
    file = ModelImage("map", size, whole_file(size, _MAPPED), digest=digest_of(fd), _by_node={-1: fd})
    if mode == "map" and placement in ("auto", "none"):
        return file
    with _closing_on_error(file):
        topology = topology or read_topology()
        plan = place(path, fd, size, placement, topology)
        if mode == "map":
            if plan.nodes:
                raise SegmentError(f"{path}: placement {placement} needs a copy in memory: use load mode memfd or auto")
            return file
        available = topology.memory_available_bytes if available is None else available
        kept = None if keep is None else _kept(path, fd, plan, keep)
        needed = sum(extent.bytes for extent in (plan.extents if kept is None else kept))
        if needed == 0 and kept is not None:
            file.placement = whole_file(size, "nothing is kept in memory, so the file is mapped")
            return file
        asked_for = bool(plan.nodes) and placement != "auto"
        if mode == "auto" and not asked_for and not 0 < 2 * needed + RESERVE <= available:
            file.placement = whole_file(size, _TOO_LARGE)
            return file
        _check_room(path, needed, available)
        layout = read_layout(fd) if plan.nodes else None
        copy = _begin_copy(path, fd, plan, layout, topology, kept)
        copy.digest = file.digest
        if kept is not None:
            file._by_node, copy._file = {}, fd
    file.close()
    if complete:
        with _closing_on_error(copy):
            copy.complete()
    return copy


def digest_of(fd: int) -> str:
    """ModelImage.digest."""
    try:
        return read_digest(fd)
    except (LayoutError, OSError):  # whoever opens it as a model says what is wrong
        return ""


def place(path: str | os.PathLike[str], fd: int, size: int, placement: Placement, topology: Topology) -> PlacementPlan:
    """Where a container's bytes are to lie. SegmentError, PlacementError."""
    if len(placement_nodes(topology)) < 2 or placement == "none":
        return whole_file(size) if placement != "none" else whole_file(size, "no placement was asked for")
    try:
        return plan_placement(read_layout(fd), topology, placement)
    except LayoutError as error:
        raise SegmentError(f"{path}: {error}") from error
    except OSError as refusal:
        raise SegmentError(f"{path}: the header can't be read: {refusal.strerror}") from refusal


def _kept(path: str | os.PathLike[str], fd: int, plan: PlacementPlan, keep: Keep) -> tuple[Extent, ...]:
    try:
        return kept_extents(plan, read_layout(fd), keep)
    except LayoutError as error:
        raise SegmentError(f"{path}: {error}") from error


@contextlib.contextmanager
def _closing_on_error(image: ModelImage) -> Iterator[None]:
    try:
        yield
    except BaseException:
        image.close()
        raise


def _check_room(path: str | os.PathLike[str], size: int, available: int) -> None:
    if size == 0:
        raise SegmentError(f"{path}: the file is empty")
    if size + RESERVE > available:
        raise SegmentError(
            f"{path}: a copy in memory needs {_mib(size + RESERVE)}, {_mib(available)} is free; use load mode map, which needs no copy"
        )


def _begin_copy(
    path: str | os.PathLike[str],
    file: int,
    placement: PlacementPlan,
    layout: Layout | None,
    topology: Topology,
    kept: tuple[Extent, ...] | None,
) -> ModelImage:
    """The file's page cache is left alone: the next start, or another program, finds it warm, and the kernel takes it when it must."""
    image = ModelImage("memfd", os.fstat(file).st_size, placement, path=path, layout=layout, kept=kept)
    copied = placement if kept is None else replace(placement, extents=kept)
    image.filled = fine_extents(copied, layout)
    with _telling(path), _closing_on_error(image):
        image._copying = Copying(path, file, image.bytes, image.filled, topology)
        image._by_node = dict(image._copying.fds)
        image._copying.start(header_end(file))
    return image


@contextlib.contextmanager
def _telling(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except FillError as error:
        raise SegmentError(f"{path}: {error}") from error
    except OSError as refusal:
        raise SegmentError(f"{path}: no copy in memory could be made: {refusal.strerror}; use load mode map") from refusal


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
