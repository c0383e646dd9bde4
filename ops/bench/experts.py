"""What experts on nodes cost: real nodes on loopback and a front end's steps here, against the same steps with all experts here.

Everything that is compared runs in turn, burst by burst, on the same sequences. A layer is timed within real decode steps, from the moment
at which its mini-batches are handed out until all outputs are back; the same layer here, from the same moment until it is computed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from engine_c import RemoteExperts, Session
from ops.bench.experts_nodes import connected, node_processes, pinned, share_cores
from ops.bench.measure import BenchError, Row
from ops.bench.steps import Bench, BenchConfig, Helper, all_decode, opened
from service.nodes.nodes import Nodes

_WARM_BURSTS = 2
_BURST = 16  # steps of a burst


@dataclass(slots=True)
class Here:
    """Computes what is asked for here, all experts being declared remote: the layer by itself, without a wire."""

    layers: int
    experts: int

    def prepare(self, session: Session) -> None:
        """All experts come by `receive`."""
        session.set_remote(np.ones((self.layers, self.experts), np.bool_))

    def send(self, call: RemoteExperts) -> None:
        """Nothing is sent."""

    def receive(self, call: RemoteExperts) -> None:
        """Here after all."""
        call.compute(list(call.counts))


@dataclass(slots=True)
class Timed:
    """Times the layers that somebody else computes: microseconds each."""

    inner: Helper
    layers: list[float] = field(default_factory=list)
    _sent: float = 0.0

    def prepare(self, session: Session) -> None:
        """As the other does."""
        self.inner.prepare(session)

    def send(self, call: RemoteExperts) -> None:
        """The clock runs from here."""
        self._sent = time.perf_counter()
        self.inner.send(call)

    def receive(self, call: RemoteExperts) -> None:
        """Until here."""
        self.inner.receive(call)
        self.layers.append(1e6 * (time.perf_counter() - self._sent))


@dataclass(slots=True)
class Arrangement:
    """One of those that are compared. `ready` is called before each of its bursts."""

    name: str
    bench: Bench
    ready: Callable[[], Timed | None]
    steps: list[float] = field(default_factory=list)  # milliseconds of a step, on average, of each burst
    layers: list[float] = field(default_factory=list)  # microseconds of a layer, the median of each burst
    computing: list[float] = field(default_factory=list)  # of these, what nodes say they computed for, on average

    def burst(self, nodes: Nodes, *, keep: bool) -> None:
        """Some steps; keep: they count."""
        timed = self.bench.elsewhere = self.ready()
        before = _computed(nodes)
        seconds = [self.bench.step().seconds for _ in range(_BURST)]
        if not keep:
            return
        self.steps.append(1e3 * statistics.fmean(seconds))
        if timed is not None:
            self.layers.append(statistics.median(timed.layers))
            self.computing.append(1e6 * (_computed(nodes) - before) / len(timed.layers))


def bench_experts(path: Path, config: BenchConfig, *, nodes: Sequence[int], streams: Sequence[int], prompt: int) -> list[Row]:
    """For each number of nodes and of streams: a layer in microseconds and a step in milliseconds, here and there."""
    rows: list[Row] = []
    for count in nodes:
        cores = share_cores(sorted(os.sched_getaffinity(0)), count, lanes=_lanes(config))
        with pinned(cores.front), node_processes(path, config, cores) as places:
            for running in streams:
                with _sides(path, config, streams=running, prompt=prompt) as (plain, split), connected(path, places, split.team) as there:
                    found = _compare(_arrangements(plain, split, there), there, config.samples)
                    rows += _rows(found, nodes=count, streams=running)
    return rows


def _lanes(config: BenchConfig) -> int:
    return max(1, (config.workers_per_node or 0) * (config.threads_per_worker or 1))


@contextmanager
def _sides(path: Path, config: BenchConfig, *, streams: int, prompt: int) -> Iterator[tuple[Bench, Bench]]:
    """Two sessions with the same sequences, all decoding: as a server without nodes has it, and with experts kept apart."""
    answer = (config.samples + _WARM_BURSTS) * 3 * _BURST + streams + 2
    with ExitStack() as undo:
        made = []
        for split_down in (False, True):
            room = {"streams": streams, "tokens": prompt + answer}
            bench = undo.enter_context(opened(path, replace(config, load="map"), split_down=split_down, **room))
            if prompt + answer > bench.info.max_context:
                raise BenchError(f"{answer} tokens behind a prompt of {prompt} do not fit the model's context; fewer samples do")
            all_decode(bench, streams=streams, prompt=prompt, answer=answer)
            undo.callback(bench.finish)
            made.append(bench)
        yield made[0], made[1]


def _arrangements(plain: Bench, split: Bench, nodes: Nodes) -> list[Arrangement]:
    info = split.info

    def there() -> Timed:
        nodes.remote.forget_told()
        return Timed(nodes.remote)

    return [
        Arrangement("local", plain, lambda: None),
        Arrangement("layers here", split, lambda: Timed(Here(info.layers, info.experts))),
        Arrangement("nodes", split, there),
    ]


def _compare(arrangements: list[Arrangement], nodes: Nodes, samples: int) -> list[Arrangement]:
    for index in range(_WARM_BURSTS + samples):
        for arrangement in arrangements:
            arrangement.burst(nodes, keep=index >= _WARM_BURSTS)
    return arrangements


def _computed(nodes: Nodes) -> float:
    """Seconds that nodes say they have computed for; the slowest one counts where several do at once, which is not known: their mean."""
    members = nodes.members
    return sum(member.record.compute_s for member in members) / len(members)


def _rows(found: list[Arrangement], *, nodes: int, streams: int) -> list[Row]:
    local, here, there = found
    where, load = f"{nodes} node{'s' * (nodes > 1)}", f"{streams} row{'s' * (streams > 1)}"
    layer, step = f"{where}: layer of {load}", f"{where}: step of {load}"
    over = [far - near for far, near in zip(there.layers, here.layers, strict=True)]
    ratios = [far / near for far, near in zip(there.steps, local.steps, strict=True)]
    layer_facts = {"overhead us": statistics.median(over), "nodes compute us": statistics.median(there.computing)}
    step_facts = {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    return [
        Row(f"{layer}, here", "us", tuple(here.layers)),
        Row(f"{layer}, there", "us", tuple(there.layers), layer_facts, statistics.median(here.layers)),
        Row(f"{step}, local", "ms", tuple(local.steps)),
        Row(f"{step}, there", "ms", tuple(there.steps), step_facts, statistics.median(local.steps)),
    ]
