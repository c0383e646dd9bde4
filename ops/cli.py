"""Entry point of the `colibri` command.

Exit codes: 0 success, 1 the command failed, 2 it was called wrongly, 130 interrupted. Every error is one line on stderr.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from ops.commands import version
from ops.commands.common import USAGE, describe_failure
from service.collector import seldom_collect

MODULES: dict[str, tuple[str, ...]] = (
    {name: (name,) for name in ("serve", "node", "generate", "chat", "route", "top")}
    | {
        "workers": ("workers", "scale", "drain", "restart-worker", "topology"),
        "routing": ("routing",),
        "models_admin": ("models", "swap"),
    }
    | {name: (name,) for name in ("record", "rebalance", "convert", "inspect", "verify", "logits", "bench", "health", "ray", "version")}
)
"""Of ops.commands, in the order of the help, with the commands that each registers."""

SERVERS = ("serve", "node")
"""Commands that go on until they are told to stop."""


def make_app(command: str | None = None) -> typer.Typer:
    """The command line. command: what it will be asked for, if that is known, is all it then has: the others take longer to import and
    describe than a server to listen."""
    app = typer.Typer(
        name="colibri",
        help="Mixture-of-experts inference on CPUs, over gRPC.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True)(root)
    wanted = [module for module, commands in MODULES.items() if command in commands] or list(MODULES)
    for module in wanted:
        import_module(f"ops.commands.{module}").register(app)
    return app


def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """What the command line does without a command."""
    if context.invoked_subcommand not in SERVERS:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else gRPC has its say about certificates before our one line
    if show_version:
        typer.echo(f"colibri {version.package_version()}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USAGE)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (default: sys.argv) and returns its exit code. Only a bug of ours leaves it as an exception."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in SERVERS:
        seldom_collect()  # what is imported from here on stays
    try:
        app = make_app(words[0] if words else None)
        code = app(args=words, prog_name="colibri", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    except Exception as failure:
        described = describe_failure(failure)
        if described is None:
            raise
        code, message = described
        if message:
            print(f"colibri: {message}", file=sys.stderr)
        return code


def main() -> None:
    """The console script."""
    sys.exit(run())


if __name__ == "__main__":
    main()
