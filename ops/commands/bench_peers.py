"""The measurements of `colibri bench` that look at other engines, and their plot."""

from __future__ import annotations

import typer


def register(group: typer.Typer) -> None:
    """Adds the commands."""
