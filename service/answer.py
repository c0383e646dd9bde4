"""An answer as it grows: tokens in, text out, ended by a stop string if one is complete. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from service.detokenise import Detokeniser
from service.stops import StopMatcher


class Answer:
    """The text of one answer. Token by token, so that where it ends does not depend on how tokens were bunched.

    `detokeniser` None: the model has no tokenizer and the text stays empty.
    """

    def __init__(self, detokeniser: Detokeniser | None, *, stops: Sequence[str] = (), include_stop: bool = False) -> None:
        self._detokeniser = detokeniser
        self._matcher = StopMatcher(stops)
        self._include_stop = include_stop
        self.tokens = 0
        self.matched: str | None = None

    def feed(self, token: int) -> str:
        """The text this token makes certain. Once `matched` is set the answer is over."""
        self.tokens += 1
        return self._emit(self._detokeniser.feed(token)) if self._detokeniser is not None else ""

    def finish(self) -> str:
        """The text still held back, when no more tokens come. This, too, may complete a stop string."""
        if self._detokeniser is None or self.matched is not None:
            return ""
        text = self._emit(self._detokeniser.flush())
        return text if self.matched is not None else text + self._matcher.flush()

    def _emit(self, text: str) -> str:
        match = self._matcher.feed(text)
        self.matched = match.stop
        return match.text + match.stop if match.stop is not None and self._include_stop else match.text
