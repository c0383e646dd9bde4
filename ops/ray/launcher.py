"""Places agents on a Ray cluster, one a Ray node, and moves those whose Ray node is lost to one that has none."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ops.ray.agent import Agent, AgentSpec

log = logging.getLogger("colibri.ray")
_ANSWER = 10.0  # seconds for an actor to say how it is: one that does not is busy coming back
_START = 60.0  # seconds for an actor to be there
_STOP = 90.0  # seconds for a node to finish what it has


class RayLaunchError(Exception):
    """The agents can't be placed; the sentence says why."""


@dataclass(frozen=True, slots=True)
class AgentState:
    """An agent as it was seen last. `pid` 0: its process does not run."""

    name: str
    address: str
    ray_node: str
    pid: int
    restarts: int
    error: str


@dataclass(slots=True)
class _Placed:
    spec: AgentSpec
    ray_node: str
    host: str
    actor: Any  # a handle of Ray's; what it calls is not typed

    @property
    def address(self) -> str:
        return f"{self.host}:{self.spec.port}"


def place(names: Sequence[str], free: Mapping[str, str], taken: Mapping[str, str]) -> dict[str, str]:
    """Which Ray node each agent without one gets: `free` has the Ray nodes alive (id to host), `taken` agents that have theirs. Agents stay
    where they are; the others get Ray nodes that have none, both in ascending order, as far as there are such."""
    spare = sorted(set(free) - set(taken.values()))
    homeless = [name for name in names if taken.get(name) not in free]
    return dict(zip(homeless, spare, strict=False))


class Launcher:
    """The agents of one model. Connected to a cluster already (ray.init). Not for several threads."""

    def __init__(self, specs: Sequence[AgentSpec], *, cpus: float = 1.0) -> None:
        """`cpus`: what each actor takes of its Ray node's, for Ray's own books."""
        self._specs = {spec.name: spec for spec in specs}
        self._cpus = cpus
        self._placed: dict[str, _Placed] = {}

    def start(self) -> None:
        """Places all agents. RayLaunchError if there are fewer Ray nodes than agents: two on one would share its memory and its end."""
        alive = ray_nodes()
        if len(alive) < len(self._specs):
            raise RayLaunchError(f"{len(self._specs)} nodes are wanted, the cluster has {len(alive)}: add Ray nodes, or lower --nodes")
        self._place(alive)
        for placed in self._placed.values():
            try:
                ray.get(placed.actor.state.remote(), timeout=_START)
            except RayError as error:
                raise RayLaunchError(f"{placed.spec.name} can't be started on {placed.host}: {error}") from error

    def addresses(self) -> str:
        """As `colibri serve --nodes` takes them."""
        return ",".join(self._placed[name].address for name in self._specs if name in self._placed)

    def look(self) -> list[AgentState]:
        """How the agents are. Those whose Ray node has gone are placed anew, as soon as there is one without an agent."""
        alive = ray_nodes()
        for name, placed in list(self._placed.items()):
            if placed.ray_node not in alive:
                log.warning("%s: its Ray node at %s is lost", name, placed.host)
                ray.kill(placed.actor)
                del self._placed[name]
        self._place(alive)
        return [self._state(name) for name in self._specs]

    def stop(self) -> None:
        """Lets all nodes finish what they have, and ends the actors."""
        pending = {name: placed.actor.stop.remote() for name, placed in self._placed.items()}
        for name, reply in pending.items():
            try:
                ray.get(reply, timeout=_STOP)
            except RayError as error:
                log.warning("%s did not end by itself: %s", name, error)
            ray.kill(self._placed.pop(name).actor)

    def _place(self, alive: Mapping[str, str]) -> None:
        taken = {name: placed.ray_node for name, placed in self._placed.items()}
        for name, node in place(list(self._specs), alive, taken).items():
            spec = self._specs[name]
            actor = ray.remote(Agent).options(  # type: ignore[call-overload,unused-ignore]
                num_cpus=self._cpus,
                max_restarts=-1,
                max_concurrency=2,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            )
            self._placed[name] = _Placed(spec, node, alive[node], actor.remote(spec))

    def _state(self, name: str) -> AgentState:
        placed = self._placed.get(name)
        if placed is None:
            return AgentState(name, "", "", 0, 0, "no Ray node is free for it")
        try:
            pid, restarts, error = ray.get(placed.actor.state.remote(), timeout=_ANSWER)
        except RayError:  # it is dead, or has no Ray node, or does not answer in time
            pid, restarts, error = 0, 0, "its actor is being restarted"
        return AgentState(name, placed.address, placed.ray_node, pid, restarts, error)


def ray_nodes() -> dict[str, str]:
    """Ray nodes that are alive: id to address."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
