"""The remote experts of one layer of one step: what was asked of whom, what is late, and who is asked instead. Pure; time is passed in.

Answers are told apart by numbers that are given once: what was asked in an earlier step, or of a node that was given up, is not known here
and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from service.nodes.holders import choose

Row = Sequence[Sequence[int]]


@dataclass(slots=True)
class Sent:
    """Experts asked of one stream. Times in seconds; `due`: given up then; `hedge`: asked of another as well then."""

    id: int
    key: int
    experts: tuple[int, ...]
    pairs: int
    at: float
    due: float
    hedge: float


@dataclass(slots=True)
class Flight:
    """`row()` gives the holders as they are at that moment. patience(pairs): seconds that so many pairs may take. hedge: seconds after
    which another holder is asked too; 0: none is."""

    counts: Mapping[int, int]
    row: Callable[[], Row]
    ids: Iterator[int]
    patience: Callable[[int], float]
    hedge: float = 0.0
    open: dict[int, Sent] = field(default_factory=dict)
    wanted: set[int] = field(init=False)
    gone: set[int] = field(default_factory=set)  # keys that are not asked again
    hedged: list[int] = field(default_factory=list)  # keys of those whose batches were asked of others too, one for each batch

    def __post_init__(self) -> None:
        self.wanted = set(self.counts)

    @property
    def stranded(self) -> list[int]:
        """Wanted, and asked of nobody: nobody that is there holds them."""
        asked = {expert for sent in self.open.values() for expert in sent.experts}
        return sorted(self.wanted - asked)

    def ask(self, experts: Sequence[int], now: float) -> list[Sent]:
        """Batches for whoever holds these; what nobody holds is stranded."""
        choice = choose(self.row(), {expert: self.counts[expert] for expert in experts}, without=self.gone)
        return [self._sent(key, chosen, now, self.hedge) for key, chosen in choice.experts.items()]

    def start(self, now: float) -> list[Sent]:
        """Batches for all experts."""
        return self.ask(list(self.counts), now)

    def answered(self, number: int) -> tuple[Sent, list[int]] | None:
        """What an answer was to, and which of its experts are still wanted; they no longer are then. None: nobody waits for it."""
        sent = self.open.pop(number, None)
        if sent is None:
            return None
        news = [expert for expert in sent.experts if expert in self.wanted]
        self.wanted.difference_update(news)
        if news:
            self._forget_hedges()
        return sent, news

    def done(self, experts: Sequence[int]) -> None:
        """These were computed otherwise."""
        self.wanted.difference_update(experts)
        self._forget_hedges()

    def lose(self, key: int, now: float) -> list[Sent]:
        """A stream ended: what it was asked is asked of others, unless they have been already."""
        self.gone.add(key)
        lost = [sent for sent in self.open.values() if sent.key == key]
        for sent in lost:
            del self.open[sent.id]
        stranded = set(self.stranded)
        again = sorted({expert for sent in lost for expert in sent.experts} & stranded)
        return self.ask(again, now) if again else []

    def late(self, now: float) -> list[int]:
        """Keys of streams that have not answered in time."""
        return sorted({sent.key for sent in self.open.values() if sent.due <= now})

    def hedges(self, now: float) -> list[Sent]:
        """Batches for other holders of what is slow to come; each is hedged once."""
        made: list[Sent] = []
        for slow in [sent for sent in self.open.values() if sent.hedge <= now]:
            slow.hedge = float("inf")
            todo = {expert: self.counts[expert] for expert in slow.experts if expert in self.wanted}
            choice = choose(self.row(), todo, without={*self.gone, slow.key})
            made += [self._sent(key, chosen, now, 0.0) for key, chosen in choice.experts.items()]
            if choice.experts:
                self.hedged.append(slow.key)
        return made

    def next_time(self) -> float:
        """When something is late, if nothing comes before."""
        return min((min(sent.due, sent.hedge) for sent in self.open.values()), default=float("inf"))

    def _sent(self, key: int, experts: Sequence[int], now: float, hedge: float) -> Sent:
        pairs = sum(self.counts[expert] for expert in experts)
        sent = Sent(next(self.ids), key, tuple(experts), pairs, now, now + self.patience(pairs), now + hedge if hedge > 0 else float("inf"))
        self.open[sent.id] = sent
        return sent

    def _forget_hedges(self) -> None:
        """What was asked twice and has come need not be waited for."""
        for number in [sent.id for sent in self.open.values() if self.wanted.isdisjoint(sent.experts)]:
            del self.open[number]
