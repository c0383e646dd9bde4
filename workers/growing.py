"""A share of a model that changes: experts are copied into memory, and their memory given back, while others compute.

Each NUMA node's copies lie in one memory file as large as the model, of which only what is held takes memory. This process alone can write
to it: everybody maps it by a descriptor that can only be read. Nobody can change its size.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine_c import EngineError, Model, Part
from workers.filling import FillError, Filling
from workers.keeping import Keep, kept_extents, left_out
from workers.layout import Layout, LayoutError, read_layout
from workers.mapping import MADV_POPULATE_READ, PAGE, advise, mapped, punch
from workers.placement import Extent, Placement, whole_file
from workers.segments import RESERVE, LoadMode, ModelImage, PlacementReport, SegmentError, digest_of, place
from workers.supervisor import Supervisor
from workers.topology import Topology, read_topology

log = logging.getLogger("colibri.workers")

FOLLOW_S = 5.0
"""How long workers may take to map a number of pieces."""


class ShareError(RuntimeError):
    """A share can't be held; says why. What was held is held still."""


class ShareTooLarge(ShareError):
    """There is too little memory for it."""


class UnknownExpert(ShareError):
    """The model has no such expert."""


@dataclass(frozen=True, slots=True)
class _Team:
    """Who maps the image."""

    model: Model
    supervisor: Supervisor
    front_node: int


def open_growing(path: str | os.PathLike[str], *, placement: Placement, topology: Topology, mode: LoadMode) -> ModelImage:
    """An image of which nothing is held yet; mode "map": and nothing ever copied. SegmentError, PlacementError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as refusal:
        raise SegmentError(f"{path}: {refusal.strerror}") from refusal
    size = os.fstat(fd).st_size
    where = whole_file(size, "the file is mapped, so its pages lie wherever they were read")
    image = ModelImage("map", size, where, digest=digest_of(fd), _by_node={-1: fd})
    try:
        if mode == "map" and placement not in ("auto", "none"):
            raise SegmentError(f"{path}: placement {placement} needs copies in memory: use load mode memfd or auto")
        if mode == "map":
            return image
        plan = place(path, fd, size, placement, topology)
        grows = ModelImage("memfd", size, plan, digest=image.digest, kept=(), _file=fd)
        image._by_node = {}
    except BaseException:
        image.close()
        raise
    try:
        for node in sorted({extent.node for extent in plan.extents}):
            grows.writable[node], grows._by_node[node] = _memory(f"{Path(path).name}:node{node}" if node >= 0 else Path(path).name, size)
    except OSError as refusal:
        grows.close()
        raise SegmentError(f"{path}: no memory for copies could be had: {refusal.strerror}; use load mode map") from refusal
    return grows


def _memory(name: str, size: int) -> tuple[int, int]:
    """Descriptors of a memory file, for writing and for reading."""
    fd = os.memfd_create(f"colibri:{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return fd, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        os.close(fd)
        raise


class Share:
    """What of an image is held. `hold` from any thread; changes follow one another."""

    def __init__(
        self,
        image: ModelImage,
        team: tuple[Model, Supervisor, int],
        topology: Topology,
        *,
        mode: LoadMode,
        available: Callable[[], int] = lambda: read_topology().memory_available_bytes,
    ) -> None:
        """team: the model of this process, who keeps its workers, and its NUMA node. available: free memory in bytes, asked each time."""
        self._image, self._team, self._topology = image, _Team(*team), topology
        self._mode = mode
        self._available = available
        self._layout = _layout(image)
        self._pages: tuple[Extent, ...] = ()  # held as the file's own pages
        self._stale: tuple[Extent, ...] = ()  # copies that are no longer held, which somebody may still map
        self._turn = threading.Lock()

    @property
    def reads_file(self) -> bool:
        """Whether some of it is held as the file's own pages, there being too little memory for a copy."""
        return bool(self._pages)

    def hold(self, experts: frozenset[tuple[int, int]]) -> None:
        """Holds these (layer, expert) from now on: what is new is in memory when it returns; the memory of what is no longer held is given
        back once nobody maps it. Who reads that all the same reads the file. ShareError: nothing has changed."""
        with self._turn:
            wanted = self._extents(experts)
            copies = self._image.kept or ()
            new = _minus(_minus(wanted, copies), self._pages)
            if new and self._copies(new):
                self._add(new)
            elif new:
                self._read(new)
                self._pages = _union(self._pages, new)
            self._remove(_minus(copies, wanted), _minus(self._pages, wanted))

    def _extents(self, experts: frozenset[tuple[int, int]]) -> tuple[Extent, ...]:
        try:
            return kept_extents(self._image.placement, self._layout, Keep(experts, backbone=False))
        except LayoutError as error:
            raise UnknownExpert(str(error)) from error

    def _copies(self, new: Sequence[Extent]) -> bool:
        """Whether these are to be copied. ShareTooLarge if they should be and can't."""
        if self._image.mode == "map":
            return False
        needed, available = sum(extent.bytes for extent in new), self._available()
        if self._mode == "memfd" and needed + RESERVE > available:
            have = f"{needed + RESERVE >> 20} MiB are needed for it, {available >> 20} MiB are free"
            raise ShareTooLarge(f"{have}: give the node more memory or a smaller share")
        return self._mode == "memfd" or 2 * needed + RESERVE <= available

    # ---------------------------------------------------------------- more

    def _add(self, new: tuple[Extent, ...]) -> None:
        fresh = _minus(new, self._stale)
        self._fill(fresh)
        self._stale = _minus(self._stale, new)
        if not self._follow(_union(self._image.kept or (), new), new, held=True):
            log.warning("some workers go on reading the file in place of new copies of experts")

    def _fill(self, fresh: tuple[Extent, ...]) -> None:
        image = self._image
        fds = {node: image.writable[node] for node in sorted({extent.node for extent in fresh})}
        if not fds:
            return
        filling = Filling(image.file, image.bytes, fds, fresh, self._topology)
        try:
            shares = filling.run()
        except (FillError, OSError) as failure:
            self._punch(fresh)
            raise ShareError(f"experts can't be copied: {failure}") from failure
        except BaseException:
            self._punch(fresh)
            raise
        refused = tuple(dict.fromkeys((*image.report.degraded, *filling.degraded)))
        image.report = PlacementReport(shares, refused)
        at_home = "".join(f", {share.on_node >> 20} on node {share.node}" for share in shares if share.on_node is not None)
        log.info("copied %d MiB, %d on huge pages%s", sum(s.bytes for s in shares) >> 20, sum(s.huge_bytes for s in shares) >> 20, at_home)

    def _read(self, new: Iterable[Extent]) -> None:
        """Who reads the file's pages once has them for the workers too."""
        for extent in new:
            try:
                with mapped(self._image.file, extent.bytes, writable=False, offset=extent.offset) as address:
                    refusal = advise(address, -(-extent.bytes // PAGE) * PAGE, MADV_POPULATE_READ)
            except OSError as error:
                raise ShareError(f"the model's file can't be mapped: {error.strerror}") from error
            if refusal:
                end = extent.offset + extent.bytes
                raise ShareError(f"bytes {extent.offset} to {end} of the model's file can't be read: {os.strerror(refusal)}")

    # ---------------------------------------------------------------- less

    def _remove(self, copies: tuple[Extent, ...], pages: tuple[Extent, ...]) -> None:
        """Nobody may map what is punched: zeros would be read. What a worker still may have waits for the next change."""
        self._pages = _minus(self._pages, pages)
        if not copies and not pages and not self._stale:
            return
        kept = None if self._image.kept is None else _minus(self._image.kept, copies)
        self._stale = _union(self._stale, copies)
        if self._follow(kept, (*copies, *pages), held=False):
            self._punch(self._stale)
            self._stale = ()
        else:
            log.warning("some workers still map experts that are no longer held: their memory is given back later")
        for extent in pages:
            os.posix_fadvise(self._image.file, extent.offset, extent.bytes, os.POSIX_FADV_DONTNEED)

    def _punch(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            if refusal := punch(self._image.writable[extent.node], extent.offset, extent.bytes):
                log.warning("memory of experts that are no longer held can't be given back: %s", os.strerror(refusal))

    # ---------------------------------------------------------------- everybody

    def _follow(self, kept: tuple[Extent, ...] | None, changed: Sequence[Extent], *, held: bool) -> bool:
        """Has every process map what has changed, from the copies or from the file. Returns whether all do."""
        image, team = self._image, self._team
        followed = True

        def parts(node: int) -> tuple[Part, ...]:
            if image.kept is not kept:
                image.keep(kept)
            own = [extent for extent in changed if image.is_for(extent, node)]
            return tuple(image.copy_of(extent) if held else Part(image.file, -1, extent.offset, extent.bytes) for extent in own)

        for node in sorted({worker.node for worker in team.supervisor.snapshot().workers}):
            followed &= team.supervisor.remap(node, lambda node=node: parts(node), FOLLOW_S)  # type: ignore[misc]
        try:
            for part in parts(team.front_node):
                team.model.remap(part)
        except EngineError as refusal:
            log.warning("this process could not map experts anew: %s", refusal)
            return False
        return followed


def _layout(image: ModelImage) -> Layout:
    try:
        return image.layout or read_layout(image.file)
    except (LayoutError, OSError) as error:
        raise SegmentError(f"the container's layout can't be read: {error}") from error


def _minus(extents: Sequence[Extent], others: Sequence[Extent]) -> tuple[Extent, ...]:
    """What of these is not in others, ascending."""
    found: list[Extent] = []
    for node in {extent.node for extent in extents}:
        ranges, gone = ([(e.offset, e.offset + e.bytes) for e in some if e.node == node] for some in (extents, others))
        found += [Extent(node, begin, end - begin) for begin, end in left_out(sorted(ranges), sorted(gone))]
    return tuple(sorted(found, key=lambda extent: (extent.offset, extent.node)))


def _union(extents: Sequence[Extent], others: Sequence[Extent]) -> tuple[Extent, ...]:
    """Both, ascending, what touches as one."""
    merged: list[Extent] = []
    for extent in sorted((*extents, *others), key=lambda extent: (extent.node, extent.offset)):
        last = merged[-1] if merged else None
        if last is not None and last.node == extent.node and extent.offset <= last.offset + last.bytes:
            end = max(last.offset + last.bytes, extent.offset + extent.bytes)
            merged[-1] = replace(last, bytes=end - last.offset)
        else:
            merged.append(extent)
    return tuple(sorted(merged, key=lambda extent: (extent.offset, extent.node)))
