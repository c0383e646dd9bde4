"""`colibri version`."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(help="Print the versions of the package and the engine, and the instruction sets this CPU can run.")
    def version(json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
        facts = version_facts()
        typer.echo(json.dumps(facts) if json_output else "\n".join(f"{key}: {value}" for key, value in facts.items()))


def package_version() -> str:
    """As the package's metadata has it."""
    from importlib import metadata

    return metadata.version("colibri")


def version_facts() -> dict[str, str]:
    """Package, engine, instruction sets, Python."""
    import platform

    import engine_c

    return {
        "colibri": package_version(),
        "engine": engine_c.version(),
        "isa": engine_c.isa_name(),
        "isa_available": ", ".join(engine_c.isa_available()),
        "python": platform.python_version(),
    }
