"""A request's life in the scheduler: states, the transitions that are legal, and what a request carries. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from engine_c import Damping, Sampling
from service.blocks import Table
from service.slots import NONE


class State(Enum):
    """Where a request stands."""

    WAITING = "waiting"  # queued; holds no KV blocks
    PREFILL = "prefill"  # holds blocks for all its tokens; more than the newest has still to be computed
    DECODE = "decode"  # one token to compute a step
    FINISHED = "finished"  # done, as asked for
    ABORTED = "aborted"  # called off by the client or the server
    FAILED = "failed"  # could not be done; `fault` says why


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILL, State.ABORTED, State.FAILED}),
    State.PREFILL: frozenset({State.DECODE, State.WAITING, State.FINISHED, State.ABORTED, State.FAILED}),
    State.DECODE: frozenset({State.WAITING, State.FINISHED, State.ABORTED, State.FAILED}),
    State.FINISHED: frozenset(),
    State.ABORTED: frozenset(),
    State.FAILED: frozenset(),
}
LIVE = frozenset(state for state, followers in TRANSITIONS.items() if followers)


class IllegalTransition(RuntimeError):
    """The scheduler tried to move a request where it cannot go: a bug of ours."""


class Reason(Enum):
    """Why a request finished."""

    STOP = "stop"
    LENGTH = "length"
    SCORED = "scored"
    ROUTED = "routed"


@dataclass(slots=True)
class Request:
    """One sequence. `prompt` is what was asked; `output` what was sampled; `computed` how many of both have keys and values cached.

    `score`: report the log-probability of every prompt token but the first, and generate nothing. `trace`: the same with every prompt
    token's experts.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int = 1
    stop_ids: frozenset[int] = frozenset()
    deadline: float | None = None  # seconds, on the clock passed to the scheduler
    score: bool = False
    interval: float | None = None  # seconds tokens may be held on their way to the caller; None: as the server has it
    trace: bool = False
    damping: Damping | None = None  # how its tokens are routed; None: by the router alone

    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)  # prompt and output; kept as one list because every step reads it
    table: Table = field(default_factory=Table)
    slot: int = NONE  # of the engine's routing state; every running request has one, if there are any
    computed: int = 0
    cached: int = 0  # prompt tokens found in the prefix cache at the first admission
    rerouted: int = 0  # pairs of a token and a layer that damping changed,
    routed: int = 0  # of so many that it looked at
    in_flight: bool = False  # part of the step that runs now
    order: int = 0  # arrival; the youngest is preempted first
    preemptions: int = 0
    arrived: float = 0.0
    started: float | None = None  # when first scheduled
    first_token: float | None = None
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> Sequence[int]:
        """The tokens sampled so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def pending(self) -> int:
        """Tokens that have yet to go through the model. A score needs no row for the last: nothing follows it."""
        return len(self.tokens) - self.computed - (1 if self.score else 0)

    @property
    def ran(self) -> bool:
        """Whether any of it has been computed, so that sending it again elsewhere would repeat work."""
        return self.preemptions > 0 or self.computed > self.cached

    @property
    def shares_prefix(self) -> bool:
        """Whether its keys and values are what any request with these tokens has. A damped one's depend on how it was routed."""
        return self.damping is None

    @property
    def most_tokens(self) -> int:
        """Tokens whose keys and values are cached at the most: the last one sampled never is."""
        return len(self.prompt) - 1 if self.score else len(self.prompt) + self.max_tokens - 1

    def move(self, target: State) -> None:
        """Changes state; a change the table does not have raises IllegalTransition."""
        if target not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"request {self.id}: {self.state.value} -> {target.value}")
        self.state = target
