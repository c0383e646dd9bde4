"""What a node computes with: the team that holds its share, one batch at a time."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping
from importlib.metadata import version

from colibri.v1 import node_pb2
from engine_c import FORMATS, KV_FORMATS, SessionOptions, isa_name
from service.artifact import read_artifact
from service.config import ConfigError
from service.node.batches import BatchError, Work
from service.node.config import NodeConfig
from service.node.layers import LayerWork, Room, Rooms
from service.node.news import News
from service.spans import show_ranges
from service.wire import PROTOCOL
from workers.keeping import Keep, Range
from workers.layout import Layout, LayoutError, read_layout
from workers.segments import SegmentError
from workers.slot import SupervisorConfig
from workers.team import Team, TeamConfig

_STARTS = 3  # tries of a worker within start_timeout
_MAX_SEQS = 256  # of a session that runs layers; requests with more are cut
_FORMAT_NAMES = {number: name for name, number in FORMATS.items()}


class Agent:
    """The model, its workers and what is held. Any thread may call anything; batches wait for one another."""

    def __init__(self, config: NodeConfig) -> None:
        """Opens the model and starts the workers. ConfigError, or what the engine and workers raise."""
        self.config = config
        artifact = read_artifact(config.model)
        self.model_name, self.digest = artifact.name, artifact.digest
        self.layout = _read_layout(config)
        self.experts_of = tuple(len(layer) for layer in self.layout.layers)
        self.instance = secrets.token_hex(8)
        self.news = News()
        self.not_held = 0  # pairs computed of experts that are not held
        self.ranges = _check_ranges(config, len(self.layout.layers))
        layers = enumerate(self.layout.layers)
        self._held = {number: config.held(len(layer)) for number, layer in layers if len(layer) > 1} if not config.assignable else {}
        self._held = {number: experts for number, experts in self._held.items() if experts}
        self._changing = threading.Lock()
        self._computing = threading.Lock()
        self.team = Team.open(config.model, _team_config(config, self._held))
        if self.team.image.digest != self.digest:
            self.team.close()
            raise ConfigError(f"{config.model}: another file took its name while it was being opened: start the node again")
        self.rooms = Rooms(self.team.session.options.kv_blocks if self.ranges else 0)

    def compute(self, work: Work) -> tuple[bytes | bytearray, int, int]:
        """The answer to a batch, nanoseconds it took, and those it waited for others before. EngineError, SegmentError."""
        asked = time.perf_counter_ns()
        with self._computing:
            begun = time.perf_counter_ns()
            lacking = self._lacking(work)
            self.check_file(also=lacking > 0)
            session, top_k = self.team.session, self.team.model.info.top_k
            pieces = work.pieces(self.config.max_rows, top_k)
            outputs = [session.run_experts(piece, kind=work.kind) for piece in pieces]
            self.not_held += lacking
            answer = work.combine(outputs[0] if len(outputs) == 1 else b"".join(outputs), self.team.model.info.hidden)
            return answer, time.perf_counter_ns() - begun, begun - asked

    def take_room(self, blocks: int, *, owner: str, instance: str) -> Room:
        """KV blocks for a stream, after the batch that is computed. NoRoom."""
        with self._computing:
            return self.rooms.take(blocks, owner=owner, instance=instance)

    def give_room(self, room: Room) -> None:
        """They are nobody's again."""
        with self._computing:
            self.rooms.give(room)

    def run_layers(self, work: LayerWork, room: Room) -> tuple[bytes, int, int]:
        """The rows behind the layers, nanoseconds it took, and those it waited for others before. BatchError, EngineError, SegmentError."""
        asked = time.perf_counter_ns()
        with self._computing:
            begun = time.perf_counter_ns()
            if room.lost:  # a moment ago
                raise BatchError("layers: another stream of the same front end has taken over the KV blocks of this one")
            self.check_file()
            session, options = self.team.session, self.team.session.options
            pieces = work.pieces(options.max_rows, options.max_seqs)
            found = [session.run_layers(piece, work.first, work.end, x).tobytes() for piece, x in pieces]
            return b"".join(found), time.perf_counter_ns() - begun, begun - asked

    def check_file(self, *, also: bool = False) -> None:
        """Before pages of the model's file itself are read: if it has been cut short, that would end this process without a word (SIGBUS).
        Copies in memory last. also: what is not held is to be read, too. SegmentError."""
        if not also and not self.team.reads_file:
            return
        image = self.team.image
        size = os.fstat(image.file).st_size
        if size < image.bytes:
            remedy = "replace a model by renaming a new file over it, or load by memfd, and start the node again"
            raise SegmentError(f"{self.config.model}: it was cut from {image.bytes} to {size} bytes while the node read it: {remedy}")

    def _lacking(self, work: Work) -> int:
        held = self._held.get(work.batch.layer, ())
        return sum(count for expert, count in zip(work.batch.experts, work.batch.counts, strict=True) if expert not in held)

    def assign(self, shares: Mapping[int, tuple[int, ...]]) -> None:
        """Holds these experts from now on: what is new is in memory when it returns, that of what is no longer held is given back.
        ShareError: nothing has changed."""
        wanted = {layer: experts for layer, experts in sorted(shares.items()) if experts}
        with self._changing:
            self.team.hold(_pairs(wanted))
            self._held = wanted
            self.news.tell()

    @property
    def share_bytes(self) -> int:
        """Of the experts and layers that are held."""
        experts = sum(self.layout.layers[layer][expert].bytes for layer, experts in self._held.items() for expert in experts)
        whole = (extent for first, end in self.ranges for layer in self.layout.whole[first:end] for extent in layer)
        return experts + sum(end - begin for begin, end in whole)

    @property
    def holding(self) -> str:
        """What is held, in words."""
        if self.ranges:
            return f"layers {show_ranges(self.ranges)} of {len(self.layout.layers)} whole"
        if not self._held:
            return "no experts until a front end assigns some"
        counts = sorted({(len(experts), self.experts_of[layer]) for layer, experts in self._held.items()})
        return f"{' or '.join(f'{own} of {all_}' for own, all_ in counts)} experts in each of {len(self._held)} layers"

    def describe(self) -> node_pb2.NodeDescription:
        """What the node is and holds."""
        revision, info = self.news.revision, self.team.model.info  # first: what changes meanwhile has a later one
        description = node_pb2.NodeDescription(
            name=self.config.own_name,
            instance=self.instance,
            version=version("colibri"),
            protocol=PROTOCOL,
            isa=isa_name(),
            model=self.model_name,
            model_digest=self.digest,
            expert_format=_FORMAT_NAMES[info.expert_format],
            layers=info.layers,
            experts=info.experts,
            hidden=info.hidden,
            assignable=self.config.assignable,
            lanes=self.team.plan.lanes,
            memory_bytes=sum(node.memory_bytes for node in self.team.topology.nodes),
            share_bytes=self.share_bytes,
            state=node_pb2.NODE_STATE_DRAINING if self.news.draining else node_pb2.NODE_STATE_READY,
            revision=revision,
        )
        for layer, experts in self._held.items():
            description.shares.add(layer=layer, experts=experts)
        if self.ranges:
            description.kv_blocks, description.kv_blocks_free = self.rooms.total, self.rooms.free
            description.kv_format = self.config.kv_format
        for first, end in self.ranges:
            description.layer_ranges.add(first=first, end=end)
        return description

    def close(self) -> None:
        """Ends the workers, after the batch that is computed."""
        with self._computing:
            self.team.close()


def _read_layout(config: NodeConfig) -> Layout:
    fd = os.open(config.model, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_layout(fd)
    except LayoutError as error:
        raise ConfigError(f"{config.model}: {error}") from error
    finally:
        os.close(fd)


def _pairs(held: Mapping[int, tuple[int, ...]]) -> frozenset[tuple[int, int]]:
    return frozenset((layer, expert) for layer, own in held.items() for expert in own)


def _check_ranges(config: NodeConfig, layers: int) -> tuple[Range, ...]:
    if config.ranges and config.ranges[-1][1] > layers:
        raise ConfigError(f"layers {config.layers}: there is no layer {config.ranges[-1][1] - 1}, the model has {layers}, from 0 on")
    return config.ranges


def _team_config(config: NodeConfig, held: Mapping[int, tuple[int, ...]]) -> TeamConfig:
    """For experts a session without room for sequences. Nothing of the backbone is kept, but of layers that are run whole."""
    seqs = min(_MAX_SEQS, config.max_rows) if config.layers else 1
    options = SessionOptions(
        max_rows=config.max_rows,
        max_seqs=seqs,
        max_logit_rows=seqs,
        kv_blocks=0 if config.layers else 1,
        kv_format=KV_FORMATS[config.kv_format],
        split_down=1,
        hang_ms=config.hang_ms,
    )
    return TeamConfig(
        load_mode=config.load,
        placement=config.placement,
        keep=Keep(_pairs(held), backbone=False, layers=config.ranges),
        grows=config.assignable,
        kv_bytes=config.kv_memory,
        kv_layers=sum(end - first for first, end in config.ranges) or None,
        workers_per_node=config.workers_per_node,
        threads_per_worker=config.threads_per_worker,
        session=options,
        start_timeout_s=config.start_timeout,
        supervisor=SupervisorConfig(start_s=config.start_timeout / _STARTS),
    )
