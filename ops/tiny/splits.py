"""Which documents are held out: whole books, plays and modules, so that nothing of them is seen in training."""

from __future__ import annotations

KINDS = ("bible", "shakespeare", "python")

TEST: dict[str, tuple[str, ...]] = {
    "bible": ("Ruth", "Ecclesiastes", "Romans"),
    "shakespeare": ("twelfth_night_gut",),
    "python": ("textwrap", "heapq", "configparser", "shutil"),
}
"""Measured at the end and shipped, in excerpts, as `ops/tiny/texts`. No gospel and no Kings: those have parallels in other books."""

VALIDATION: dict[str, tuple[str, ...]] = {
    "bible": ("Esther", "Jonah", "Hebrews", "James"),
    "shakespeare": ("julius_caesar_gut",),
    "python": ("statistics", "sched", "mailbox"),
}
"""Looked at during the training."""


def split_of(kind: str, document: str) -> str:
    """train, validation or test."""
    if document in TEST[kind]:
        return "test"
    return "validation" if document in VALIDATION[kind] else "train"
