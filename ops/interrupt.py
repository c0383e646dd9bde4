"""Ctrl-C while a call streams: it ends the call. A KeyboardInterrupt is lost where Python cannot raise it: in destructors and callbacks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted:
    """Whether Ctrl-C has come."""

    def __init__(self) -> None:
        self.yes = False

    def __bool__(self) -> bool:
        return self.yes


@contextmanager
def interrupting(cancel: Callable[[], object]) -> Iterator[Interrupted]:
    """Within, the first Ctrl-C calls `cancel`, a further one raises KeyboardInterrupt. For the main thread."""
    state = Interrupted()

    def handle(number: int, frame: FrameType | None) -> None:
        if state.yes:
            signal.default_int_handler(number, frame)
        state.yes = True
        cancel()

    former = signal.signal(signal.SIGINT, handle)
    try:
        yield state
    finally:
        signal.signal(signal.SIGINT, former)
