"""Python's search for cycles of objects, kept from holding up tokens."""

from __future__ import annotations

import gc

_AFTER = 20_000  # objects made and not freed between two searches


def seldom_collect() -> None:
    """Searches seldom from now on."""
    gc.set_threshold(_AFTER, 10, 100)


def calm_collector() -> None:
    """To be called after the start: what is there by then stays, and going through all of it again would cost milliseconds each time."""
    gc.freeze()
    seldom_collect()
