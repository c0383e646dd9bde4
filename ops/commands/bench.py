"""`colibri bench`: measurements, each a table or with --json one object; and random-weight models to measure on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ops.commands import bench_balance, bench_peers, bench_system
from ops.commands.bench_common import AsJson, Kv, Model, Prompt, Samples, Threads, Workers, bench_config, measure
from ops.commands.common import human_bytes, parse_ints
from ops.commands.convert import Head, Quant, check_paths, progress_bar
from ops.commands.logits import KvFormat

Streams = Annotated[str, typer.Option(help="Numbers of concurrent streams.")]


def register(app: typer.Typer) -> None:
    """Adds the group of commands."""
    group = typer.Typer(no_args_is_help=True, help="Measure the machine, whole steps and the service; make random-weight models.")
    group.command("make-model", help="Write a model of random weights.")(make_model)
    group.command("bandwidth", help="What this machine can do: plain reading speed and arithmetic peaks.")(bandwidth)
    group.command("prefill", help="Prompt tokens a second of one stream.")(prefill)
    group.command("decode", help="Generated tokens a second of one stream, against the memory's plain reading speed.")(decode)
    group.command("batch", help="Generated tokens a second of several streams of different tokens.")(batch)
    group.command("latency", help="Times between the tokens of one stream, and how they scatter.")(latency)
    group.command("ipc", help="Round trip of a phase between processes; share of a step spent waiting and alone.")(ipc)
    group.command("router", help="Nanoseconds of routing a few tokens, beside torch if told where it is.")(router)
    bench_system.register(group)
    bench_balance.register(group)
    bench_peers.register(group)
    app.add_typer(group, name="bench")


def make_model(
    out: Annotated[Path, typer.Argument(metavar="OUT.colibri")],
    shape: Annotated[str, typer.Option(help="mm, qm, tiny, or layers,hidden,heads,kv_heads,ffn,experts,top_k,vocab.")] = "mm",
    quant: Annotated[Quant, typer.Option(help="Weight format.")] = Quant.INT8,
    head: Head = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 1,
    force: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
) -> None:
    """Random weights, real layout."""
    check_paths(out.parent, out, force=force)
    from ops.bench.shapes import parse_shape
    from ops.random_model import make_model as run

    chosen = parse_shape(shape)
    with progress_bar(f"making {out.name}") as progress:
        run(out, chosen, quant=quant.value, head=head and head.value, seed=seed, progress=progress)
    typer.echo(f"{out}: {human_bytes(out.stat().st_size)}")


def bandwidth(workers: Workers = None, threads: Threads = None, samples: Samples = 5, as_json: AsJson = False) -> None:
    """On one core and on all that would compute."""
    from ops.bench.bandwidth import bench_bandwidth

    config = bench_config(workers, threads, samples=samples)
    measure("bandwidth", None, as_json, lambda at: bench_bandwidth(at.meter, samples=samples), config=config)


def prefill(
    path: Model,
    tokens: Annotated[str, typer.Option(help="Prompt lengths.")] = "512",
    workers: Workers = None,
    threads: Threads = None,
    kv_format: Kv = KvFormat.BF16,
    samples: Samples = 5,
    as_json: AsJson = False,
) -> None:
    """One row a prompt length."""
    lengths = parse_ints(tokens, option="--tokens")
    from ops.bench.steps import bench_prefill

    config = bench_config(workers, threads, kv_format, samples)
    measure(
        "prefill",
        path,
        as_json,
        lambda at: [bench_prefill(path, config, tokens=length, meter=at.meter, limits=at.limits) for length in lengths],
        config=config,
    )


def decode(
    path: Model,
    prompt: Prompt = 64,
    workers: Workers = None,
    threads: Threads = None,
    kv_format: Kv = KvFormat.BF16,
    samples: Samples = 5,
    as_json: AsJson = False,
) -> None:
    """One stream."""
    run_streams("decode", path, [1], prompt, workers, threads, kv_format, samples, as_json)


def batch(
    path: Model,
    streams: Streams = "1,4,8,16,32,64",
    prompt: Prompt = 64,
    workers: Workers = None,
    threads: Threads = None,
    kv_format: Kv = KvFormat.BF16,
    samples: Samples = 5,
    as_json: AsJson = False,
) -> None:
    """One row a number of streams."""
    run_streams("batch", path, parse_ints(streams, option="--streams"), prompt, workers, threads, kv_format, samples, as_json)


def run_streams(
    bench: str,
    path: Path,
    counts: list[int],
    prompt: int,
    workers: int | None,
    threads: int | None,
    kv_format: KvFormat,
    samples: int,
    as_json: bool,
) -> None:
    """Decoding with each number of streams."""
    from ops.bench.steps import bench_decode

    config = bench_config(workers, threads, kv_format, samples)
    measure(
        bench,
        path,
        as_json,
        lambda at: [bench_decode(path, config, streams=n, prompt=prompt, meter=at.meter, limits=at.limits) for n in counts],
        config=config,
        notes=("limit: weights read once a step, or the products at the arithmetic peak, whichever takes longer",),
    )


def latency(
    path: Model,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to time.")] = 1000,
    prompt: Prompt = 64,
    workers: Workers = None,
    threads: Threads = None,
    kv_format: Kv = KvFormat.BF16,
    as_json: AsJson = False,
) -> None:
    """One stream; every token's own time is a sample."""
    from ops.bench.steps import bench_latency

    config = bench_config(workers, threads, kv_format)
    measure("latency", path, as_json, lambda _: [bench_latency(path, config, tokens=tokens, prompt=prompt)], config=config)


def ipc(
    path: Model,
    streams: Streams = "1,32",
    prompt: Prompt = 64,
    workers: Workers = None,
    threads: Threads = None,
    samples: Samples = 5,
    as_json: AsJson = False,
) -> None:
    """A phase of a model of almost nothing, then of the given one."""
    counts = parse_ints(streams, option="--streams")
    from ops.bench.ipc import bench_ipc

    config = bench_config(workers, threads, samples=samples)
    measure("ipc", path, as_json, lambda _: bench_ipc(path, config, streams=counts, prompt=prompt), config=config)


def router(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens routed by one call.")] = 16,
    torch_python: bench_peers.TorchPython = None,
    samples: Samples = 5,
    as_json: AsJson = False,
) -> None:
    """On one core, every instruction set this CPU has."""
    from contextlib import ExitStack

    from ops.bench.peers.torch_process import TorchProcess, TorchWish
    from ops.bench.router import bench_router

    with ExitStack() as stack:
        torch = stack.enter_context(TorchProcess(TorchWish(torch_python, 1))) if torch_python is not None else None
        measure("router", None, as_json, lambda _: bench_router(tokens=tokens, samples=samples, torch=torch))
