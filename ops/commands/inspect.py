"""`colibri inspect`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ops.commands.common import ModelFile, console, container_path


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(help="Show what a container holds: architecture, router, formats, sizes, provenance.")
    def inspect(
        path: ModelFile,
        json_output: Annotated[bool, typer.Option("--json", help="The descriptor as JSON.")] = False,
    ) -> None:
        container_path(path)
        if json_output:
            from ops.container import Container

            with Container.open(path) as container:
                typer.echo(json.dumps(container.descriptor, indent=2))
            return
        from ops.inspect import describe

        console().print(describe(path))
