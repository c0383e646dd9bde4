"""The measurements of `colibri bench` that start a server, and perplexity."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ops.commands.bench_common import AsJson, Kv, Model, Prompt, Samples, Threads, Workers, bench_config, measure
from ops.commands.common import container_path, model_file, parse_ints
from ops.commands.logits import KvFormat
from ops.commands.serve import Load
from service.transport import FEWER_HOPS, VARIABLE


def register(group: typer.Typer) -> None:
    """Adds the commands."""
    group.command("serve", help="Tokens a second at gRPC clients, against the engine's own, and where the rest goes.")(serve)
    group.command("startup", help="Opening, starting workers, to SERVING, to a cold process's first token.")(startup)
    group.command("experts", help="What a layer and a step cost whose experts are on nodes, against the same without.")(experts)
    group.command("swap", help="Making another loaded model the default, at rest and while streams run.")(swap)
    group.command("memory", help="Memory of front end and workers against weights and KV cache.")(memory)
    group.command("perplexity", help="Perplexity of a text under models, the first being what others are compared with.")(perplexity)


def serve(
    path: Model,
    streams: Annotated[str, typer.Option(help="Numbers of concurrent streams.")] = "1,32",
    prompt: Prompt = 64,
    answer: Annotated[int, typer.Option(min=16, help="Tokens each stream is given.")] = 256,
    clients: Annotated[int, typer.Option(min=1, help="Client processes the streams are shared among.")] = 1,
    workers: Workers = None,
    threads: Threads = None,
    kv_format: Kv = KvFormat.BF16,
    samples: Samples = 5,
    as_json: AsJson = False,
) -> None:
    """A server process and client processes on the same cores; the engine alone in the same run."""
    counts = parse_ints(streams, option="--streams")
    from ops.bench.serve import ServeCase, bench_serve

    config = bench_config(workers, threads, kv_format, samples)
    cases = [ServeCase(streams=count, prompt=prompt, answer=answer, clients=min(clients, count)) for count in counts]
    measure(
        "serve",
        path,
        as_json,
        lambda at: [row for case in cases for row in bench_serve(path, config, case, meter=at.meter, limits=at.limits)],
        config=config,
        limit_is="of engine",
        notes=("us/token: one second over the tokens of all streams in it; CPU time overlaps with steps where all cores have lanes",),
    )


def startup(
    path: Model, workers: Workers = None, threads: Threads = None, samples: Samples = 5, as_json: AsJson = False
) -> None:
    """With the file in the page cache."""
    from ops.bench.startup import bench_startup

    config = bench_config(workers, threads, samples=samples)
    measure("startup", path, as_json, lambda _: bench_startup(path, config), config=config)


def experts(
    path: Model,
    nodes: Annotated[str, typer.Option(help="Numbers of nodes, each with an equal share.")] = "1,3",
    streams: Annotated[str, typer.Option(help="Numbers of concurrent streams, which are the rows of a layer.")] = "1,8,32",
    prompt: Prompt = 64,
    workers: Workers = 0,
    threads: Threads = None,
    kv_format: Kv = KvFormat.BF16,
    samples: Samples = 5,
    as_json: AsJson = False,
) -> None:
    """Node processes on loopback. Workers and threads are those of every process; with few cores, nodes share what is left of them."""
    counts, running = parse_ints(nodes, option="--nodes"), parse_ints(streams, option="--streams")
    os.environ.setdefault(VARIABLE, FEWER_HOPS)  # as a front end with nodes has it
    from ops.bench.experts import bench_experts

    config = bench_config(workers, threads, kv_format, samples)
    measure(
        "experts",
        path,
        as_json,
        lambda _: bench_experts(path, config, nodes=counts, streams=running, prompt=prompt),
        config=config,
        limit_is="of local",
        notes=("the front end has cores of its own; nodes have others, and share them where there are fewer than lanes",),
    )


def swap(
    path: Model,
    other: Annotated[Path | None, typer.Argument(metavar="OTHER", parser=model_file, help="The model to swap to; else the same.")] = None,
    streams: Annotated[int, typer.Option(min=1, help="Streams on the first model meanwhile.")] = 8,
    workers: Workers = None,
    threads: Threads = None,
    samples: Samples = 5,
    as_json: AsJson = False,
) -> None:
    """Two models of one server, both loaded."""
    second = container_path(other or path)
    from ops.bench.swap import bench_swap

    config = bench_config(workers, threads, samples=samples)
    measure("swap", path, as_json, lambda _: bench_swap(path, second, config, streams=streams), config=config)


def memory(
    path: Model,
    workers: Annotated[str, typer.Option("--workers", help="Numbers of worker processes per NUMA node.")] = "0,1,2",
    kv_memory: Annotated[str, typer.Option(help="KV cache of the server.")] = "256MiB",
    load: Annotated[Load, typer.Option(help="How the server loads the weights.")] = Load.MAP,
    as_json: AsJson = False,
) -> None:
    """Proportional set sizes once all weights have been read."""
    counts = parse_ints(workers, option="--workers")
    from ops.bench.memory import bench_memory

    config = bench_config(None, 1)
    measure(
        "memory",
        path,
        as_json,
        lambda _: bench_memory(path, config, workers=counts, kv_memory=kv_memory, load=load.value),
        limit_is="of weights + KV",
        notes=("KV pages count once they have been written; below 100 % not all of the cache was used",),
    )


def perplexity(
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A text file.")],
    models: Annotated[list[Path], typer.Argument(metavar="MODEL ...", parser=model_file)],
    window: Annotated[int, typer.Option(min=2, help="Tokens predicted from at most this many before them.")] = 512,
    kv_format: Kv = KvFormat.F32,
) -> None:
    """A Markdown table, one line a model."""
    for path in models:
        container_path(path)
    from ops.bench.perplexity import compare

    for line in compare(models, text.read_text(encoding="utf-8"), window=window, kv_format=kv_format.value):
        typer.echo(line)
