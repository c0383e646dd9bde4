"""`colibri verify`."""

from __future__ import annotations

import typer

from ops.commands.common import ModelFile, container_path


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(help="Check every checksum of a container. Exit code 1 names what is damaged.")
    def verify(path: ModelFile) -> None:
        from ops.verify import verify as run

        report = run(container_path(path))
        typer.echo(f"{path}: {report}")
