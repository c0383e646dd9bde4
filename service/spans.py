"""Layers in settings: 0-3,8 names five. Without protobuf, for the settings are read before anything else."""

from __future__ import annotations

import re

Range = tuple[int, int]  # first, end
_SPAN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def parse_ranges(text: str) -> tuple[Range, ...]:
    """The ranges [first, end) that are meant, ascending and apart. ValueError, with a sentence."""
    spans = []
    for word in text.split(","):
        match = _SPAN.fullmatch(word.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match and first > last:
            raise ValueError(f"{word.strip()} is the wrong way round, {last}-{first} is meant")
        if not match:
            raise ValueError(f"{word.strip()!r} is neither a number nor a span such as 16-31")
        spans.append((first, last + 1))
    return merge_ranges(spans)


def merge_ranges(ranges: list[Range] | tuple[Range, ...]) -> tuple[Range, ...]:
    """Those that overlap or touch are one."""
    merged: list[Range] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)


def show_ranges(ranges: list[Range] | tuple[Range, ...]) -> str:
    """As they are written in settings: the last of each is named, not the one behind it."""
    return ", ".join(str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in ranges)
