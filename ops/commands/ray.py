"""`colibri ray up`: node agents on a running Ray cluster."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.common import CommandError

if TYPE_CHECKING:
    from ops.ray.launcher import AgentState, Launcher

_EVERY = 2.0  # seconds between two looks at the agents
_PROGRAM = (sys.executable, "-m", "ops.cli")


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    group = typer.Typer(help="Node agents on a Ray cluster.", no_args_is_help=True)
    group.callback()(lambda: None)
    group.command("up", help="Start nodes on a running Ray cluster, one a Ray node, and keep them running until Ctrl-C.")(up)
    app.add_typer(group, name="ray")


def up(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As `colibri node` takes it, there on every Ray node.")],
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="How many; each holds as large a share of the experts.")] = 3,
    address: Annotated[str, typer.Option(help="Of the cluster; auto: the one of this machine.")] = "auto",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the first node; the others' follow.")] = 50061,
    cpus: Annotated[float, typer.Option(min=0, help="CPUs each takes in Ray's books.")] = 1.0,
    node_option: Annotated[list[str] | None, typer.Option(help="For `colibri node`, such as --insecure; repeat it.")] = None,
    write: Annotated[Path | None, typer.Option(help="File for their addresses; `colibri serve --nodes file:PATH` follows it.")] = None,
) -> None:
    """Prints the addresses, and again when they change."""
    if port + nodes - 1 > 65535:
        raise typer.BadParameter(f"--port {port}: {nodes} nodes need ports up to {port + nodes - 1}; the highest is 65535")
    if importlib.util.find_spec("ray") is None:
        raise CommandError("Ray is not installed here: pip install 'colibri[ray]'")
    import ray

    from ops.ray.agent import AgentSpec, node_command
    from ops.ray.launcher import Launcher, RayLaunchError

    specs = [
        AgentSpec(name, at, node_command(_PROGRAM, model, share=(n, nodes), name=name, host="0.0.0.0", port=at, extra=node_option or ()))
        for n, name, at in ((n, f"ray-{n}", port + n - 1) for n in range(1, nodes + 1))
    ]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        ray.init(address=address, logging_level=logging.WARNING)
        launcher = Launcher(specs, cpus=cpus)
        launcher.start()
    except (ConnectionError, RayLaunchError) as error:
        raise CommandError(str(error)) from error
    _watch(launcher, write)


def _watch(launcher: Launcher, write: Path | None) -> None:
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    told, states = "", list[str]()
    while True:
        now = [_line(state) for state in launcher.look()]
        if now != states:
            states = now
            print("\n".join(now), file=sys.stderr, flush=True)
        if (addresses := launcher.addresses()) != told:
            told = addresses
            _tell(addresses, write)
        if over.wait(_EVERY):
            break
    launcher.stop()


def _line(state: AgentState) -> str:
    runs = f"process {state.pid}" if state.pid else "not running"
    again = f", started again {state.restarts} times" if state.restarts else ""
    return f"{state.name}: {state.address or 'nowhere'}: {runs}{again}{f' ({state.error})' if state.error else ''}"


def _tell(addresses: str, write: Path | None) -> None:
    print(f"colibri serve MODEL --nodes {addresses}", flush=True)
    if write is not None:
        write_addresses(addresses, write)


def write_addresses(addresses: str, path: Path) -> None:
    """Puts them into a file, which whoever reads it meanwhile finds whole."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(addresses + "\n", encoding="ascii")
    fresh.replace(path)
