"""The measurements of `colibri bench` about how evenly experts are used, and what it costs to even it out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.bench_common import AsJson, Model, Threads, Workers, bench_config, measure
from ops.commands.common import console, container_path, parse_ints

if TYPE_CHECKING:
    from engine_c import Damping

Texts = Annotated[Path, typer.Option(exists=True, file_okay=False, help="A folder of held-out texts: one .txt a kind.")]
Settings = Annotated[list[str], typer.Option("--setting", help="Only these, e.g. capacity/batch,margin=0.5; may be given several times.")]
NO_SETTINGS: list[str] = []
StreamCount = Annotated[int, typer.Option("--streams", min=1, max=512, help="Streams that decode together.")]
Context = Annotated[int, typer.Option(min=16, help="Tokens of an excerpt; then a stream begins a new one.")]


def register(group: typer.Typer) -> None:
    """Adds the commands."""
    group.command("balance", help="Routing policies on held-out texts: perplexity, queues, nodes; every setting.")(balance)
    group.command("balance-speed", help="What routing policies cost or gain in time.")(balance_speed)
    group.command("balance-replay", help="Recorded traffic over nodes, placed by the planner from the traffic before.")(balance_replay)


def balance(
    path: Model,
    texts: Texts,
    policies: Annotated[str, typer.Option(help="Policies or policy/scope, with commas.")] = "heat,capacity,reuse",
    settings: Settings = NO_SETTINGS,
    traffic: Annotated[str, typer.Option(help="mixed, shifting or kinds, with commas; the first decides. All if not given.")] = "",
    streams: StreamCount = 16,
    steps: Annotated[int, typer.Option(min=16, help="Steps of a run, at most.")] = 2048,
    context: Context = 512,
    lanes: Annotated[int, typer.Option(min=1, max=255, help="Threads that compute.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Teacher-forced: every stream is fed its text, one token a step. Does not depend on the machine's load."""
    container_path(path)
    from ops.bench.balance import Wish, bench_balance

    names = tuple(traffic.split(",")) if traffic else ()
    wish = Wish(texts, _groups(policies), _dampings(settings), names, streams=streams, steps=steps, context=context, lanes=lanes)
    report = bench_balance(path, wish, _say)
    if as_json:
        typer.echo(report.as_json())
        return
    for table in report.tables():
        console().print(table)


def balance_speed(
    path: Model,
    texts: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="A folder of texts; random tokens if not given.")] = None,
    settings: Settings = NO_SETTINGS,
    streams: StreamCount = 16,
    context: Context = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Times that all policies are measured in turn.")] = 40,
    workers: Workers = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """All policies in turn, 16 steps each, so that ratios are of the same moment."""
    from engine_c import Model as EngineModel
    from ops.bench.balance_settings import recommended, write_setting
    from ops.bench.balance_speed import measure_speed, random_traffic
    from ops.bench.balance_traffic import load_texts, make_traffic, names

    container_path(path)
    if texts is None:
        with EngineModel.open(path) as model:
            traffic = random_traffic(model.info.vocab, streams=streams, context=context)
    else:
        found = load_texts(path, texts)
        traffic = make_traffic(names(found)[0], found, streams=streams, context=context)
    cases = {write_setting(damping): damping for damping in _dampings(settings) or recommended()}
    config = bench_config(workers, threads)
    measure(
        "balance-speed",
        path,
        as_json,
        lambda _: measure_speed(path, traffic, cases, config, rounds=rounds),
        config=config,
        notes=("x off: tokens/s over those without a policy in the same round: median, quartiles; router +%: of a step without one",),
    )


def balance_replay(
    recording: Annotated[Path, typer.Argument(metavar="RECORDING", exists=True, dir_okay=False, help="Written by `colibri record`.")],
    nodes: Annotated[str, typer.Option(help="Numbers of nodes.")] = "2,4",
    replicas: Annotated[str, typer.Option(help="Further copies a layer may have.")] = "0,1",
    window: Annotated[int, typer.Option(min=1, help="Lines of the recording a placement is planned from.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Each placement is planned from the windows before it; even: neighbouring experts on a node."""
    from ops.bench.balance_replay import replay_recording

    found = replay_recording(
        recording, nodes=parse_ints(nodes, option="--nodes"), replicas=parse_ints(replicas, option="--replicas"), window=window
    )
    if as_json:
        typer.echo(found.as_json())
    else:
        console().print(found.table())


def _groups(text: str) -> tuple[tuple[str, str], ...]:
    from ops.bench.balance_settings import GROUPS

    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not any(word in (policy, f"{policy}/{scope}") for policy, scope in GROUPS):
            raise typer.BadParameter(f"--policies {word}: there are {', '.join(f'{policy}/{scope}' for policy, scope in GROUPS)}")
    return tuple((policy, scope) for policy, scope in GROUPS if policy in words or f"{policy}/{scope}" in words)


def _dampings(settings: list[str]) -> tuple[Damping, ...]:
    from ops.bench.balance_settings import read_setting

    return tuple(read_setting(text) for text in settings)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
