"""`colibri serve`."""

from __future__ import annotations

import logging
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ops.commands.convert import Quant, progress_bar
from ops.commands.logits import KvFormat
from service.transport import FEWER_HOPS, VARIABLE

MADE_HERE = ("demo", "random")


class FrontLane(StrEnum):
    """Whether the front end computes while it waits."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Load(StrEnum):
    """How the weights come into memory."""

    AUTO = "auto"
    MAP = "map"
    MEMFD = "memfd"


class Placement(StrEnum):
    """Which weights lie on which NUMA node."""

    AUTO = "auto"
    EXPERTS = "experts"
    ROWS = "rows"
    REPLICATE = "replicate"
    NONE = "none"


class Rebalance(StrEnum):
    """Whether experts move by themselves."""

    OFF = "off"
    AUTO = "auto"


class Fallback(StrEnum):
    """Where experts are computed that no node holds."""

    FILE = "file"
    OFF = "off"


class LocalExperts(StrEnum):
    """Which experts the front end holds besides its nodes."""

    NONE = "none"
    ALL = "all"


class LogLevel(StrEnum):
    """Least severity that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(help="Serve a model over gRPC until SIGTERM or Ctrl-C, then drain. Every option is also read from COLIBRI_<OPTION>.")
    def serve(
        model: Annotated[str, typer.Argument(metavar="MODEL", help="A .colibri file, or demo, tiny or random.")],
        name: Annotated[str | None, typer.Option(help="Serve it under this name.")] = None,
        host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
        port: Annotated[int | None, typer.Option(help="Port (50051); 0 takes a free one.")] = None,
        unix_socket: Annotated[str | None, typer.Option(help="Listen on this socket instead.")] = None,
        metrics_host: Annotated[str | None, typer.Option(help="Address of the Prometheus endpoint (127.0.0.1).")] = None,
        metrics_port: Annotated[int | None, typer.Option(help="Port of the Prometheus endpoint; none by default.")] = None,
        operator_socket: Annotated[str | None, typer.Option(help="Operators' socket: a path, none, or auto (auto).")] = None,
        operator_address: Annotated[str | None, typer.Option(help="HOST:PORT for operators elsewhere; needs the three below.")] = None,
        operator_cert: Annotated[str | None, typer.Option(help="The server's certificate for operators, PEM.")] = None,
        operator_key: Annotated[str | None, typer.Option(help="Its key.")] = None,
        operator_ca: Annotated[str | None, typer.Option(help="The authority that signs operators' certificates.")] = None,
        workers_per_node: Annotated[int | None, typer.Option(help="Worker processes per NUMA node; 0 computes in this process.")] = None,
        threads_per_worker: Annotated[int | None, typer.Option(help="Lanes of each worker.")] = None,
        front_lane: Annotated[FrontLane | None, typer.Option(help="Let the front end compute while it waits (auto).")] = None,
        load: Annotated[Load | None, typer.Option(help="Map the file, copy it to memory, or auto: copy if there is plenty (auto).")] = None,
        placement: Annotated[Placement | None, typer.Option(help="Which weights lie on which NUMA node (auto).")] = None,
        rebalance: Annotated[Rebalance | None, typer.Option(help="Let experts move between NUMA nodes as the load asks for (off).")] = None,
        rebalance_interval: Annotated[float | None, typer.Option(help="Seconds between two looks at the load (30).")] = None,
        rebalance_replicas: Annotated[int | None, typer.Option(help="Further copies of experts a layer may have in all (0).")] = None,
        nodes: Annotated[str | None, typer.Option(help="Nodes that compute: dns:///NAME:PORT, HOST:PORT,HOST:PORT or file:PATH.")] = None,
        nodes_cert: Annotated[str | None, typer.Option(help="This front end's certificate for nodes, PEM.")] = None,
        nodes_key: Annotated[str | None, typer.Option(help="Its key.")] = None,
        nodes_ca: Annotated[str | None, typer.Option(help="The authority that signs nodes' certificates.")] = None,
        nodes_server_name: Annotated[str | None, typer.Option(help="Name in nodes' certificates (the host in --nodes).")] = None,
        nodes_insecure: Annotated[
            bool | None, typer.Option("--nodes-insecure/--no-nodes-insecure", help="Let nodes elsewhere be reached unencrypted (no).")
        ] = None,
        nodes_local_experts: Annotated[LocalExperts | None, typer.Option(help="Hold all experts here too, and do a part (none).")] = None,
        nodes_layers: Annotated[str | None, typer.Option(help="Layers that are nodes' to run whole, such as 0-31: not kept here.")] = None,
        nodes_fallback: Annotated[
            Fallback | None, typer.Option(help="Experts no node has: from the model file, or off: wait for them (file).")
        ] = None,
        nodes_timeout_ms: Annotated[int | None, typer.Option(help="A node that answers nothing for so long is given up (2000).")] = None,
        nodes_hedge_ms: Annotated[int | None, typer.Option(help="Ask another holder too after so long (0: never).")] = None,
        nodes_resolve_s: Annotated[float | None, typer.Option(help="Seconds between looks at what the name means (5).")] = None,
        nodes_replicas: Annotated[int | None, typer.Option(help="Nodes for every expert, if they take what is assigned (1).")] = None,
        nodes_redeal_s: Annotated[float | None, typer.Option(help="Seconds a vanished node may take to come back (10).")] = None,
        nodes_balance: Annotated[Rebalance | None, typer.Option(help="Let experts move between nodes as the load asks for (off).")] = None,
        nodes_slack: Annotated[
            float | None, typer.Option(help="Of an even share, what a node may hold beyond it when experts move or get copies (0.25).")
        ] = None,
        experts_api: Annotated[bool | None, typer.Option("--experts-api/--no-experts-api", help="Answer all of Experts (no).")] = None,
        smt: Annotated[bool | None, typer.Option("--smt/--no-smt", help="Lanes for SMT siblings too; seldom faster (no).")] = None,
        max_seqs: Annotated[int | None, typer.Option(help="Sequences of a step (64).")] = None,
        max_rows: Annotated[int | None, typer.Option(help="Tokens of a step (512).")] = None,
        kv_memory: Annotated[str | None, typer.Option(help="KV cache, for instance 2GiB; planned by default.")] = None,
        kv_format: Annotated[KvFormat | None, typer.Option(help="How keys and values are kept (bf16).")] = None,
        max_queue: Annotated[int | None, typer.Option(help="Requests that may wait (256).")] = None,
        max_queue_tokens: Annotated[int | None, typer.Option(help="Prompt tokens that may wait (262144).")] = None,
        default_max_tokens: Annotated[int | None, typer.Option(help="Length of an answer if a request does not say (512).")] = None,
        damping: Annotated[
            str | None, typer.Option(help="Of requests that do not say: off, heat, capacity, reuse, or heat,margin=0.5 (off).")
        ] = None,
        damping_scope: Annotated[str | None, typer.Option(help="What it looks at together: sequence or batch (sequence).")] = None,
        drain_grace: Annotated[float | None, typer.Option(help="Seconds that answers may take to finish after SIGTERM (30).")] = None,
        hang_ms: Annotated[int | None, typer.Option(help="A worker that holds a task longer is killed (1000); 0: never.")] = None,
        log_level: Annotated[LogLevel, typer.Option(help="What goes to stderr.")] = LogLevel.INFO,
        quant: Annotated[Quant | None, typer.Option(help="Weight format of demo and random, which are made here (bf16).")] = None,
    ) -> None:
        from service.config import ServeConfig, cache_dir

        settings = ServeConfig.from_env(
            name=name,
            host=host,
            port=port,
            unix_socket=unix_socket,
            metrics_host=metrics_host,
            metrics_port=metrics_port,
            operator_socket=operator_socket,
            operator_address=operator_address,
            operator_cert=operator_cert,
            operator_key=operator_key,
            operator_ca=operator_ca,
            workers_per_node=workers_per_node,
            threads_per_worker=threads_per_worker,
            front_lane=front_lane and front_lane.value,
            load=load and load.value,
            placement=placement and placement.value,
            rebalance=rebalance and rebalance.value,
            rebalance_interval=rebalance_interval,
            rebalance_replicas=rebalance_replicas,
            nodes=nodes,
            nodes_cert=nodes_cert,
            nodes_key=nodes_key,
            nodes_ca=nodes_ca,
            nodes_server_name=nodes_server_name,
            nodes_insecure=nodes_insecure,
            nodes_local_experts=nodes_local_experts and nodes_local_experts.value,
            nodes_layers=nodes_layers,
            nodes_fallback=nodes_fallback and nodes_fallback.value,
            nodes_timeout_ms=nodes_timeout_ms,
            nodes_hedge_ms=nodes_hedge_ms,
            nodes_resolve_s=nodes_resolve_s,
            nodes_replicas=nodes_replicas,
            nodes_redeal_s=nodes_redeal_s,
            nodes_balance=nodes_balance and nodes_balance.value,
            nodes_slack=nodes_slack,
            experts_api=experts_api,
            smt=smt,
            max_seqs=max_seqs,
            max_rows=max_rows,
            kv_memory=parse_size(kv_memory),
            kv_format=kv_format and kv_format.value,
            max_queue=max_queue,
            max_queue_tokens=max_queue_tokens,
            default_max_tokens=default_max_tokens,
            damping=damping,
            damping_scope=damping_scope,
            drain_grace=drain_grace,
            hang_ms=hang_ms,
        )
        logging.basicConfig(level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        if quant is not None and model not in MADE_HERE:
            made = " and ".join(MADE_HERE)
            raise typer.BadParameter(f"--quant {quant.value}: only {made} are made here; {model} has a format already: leave it out")
        settings = settings.with_(model=container(model, cache_dir(), (quant or Quant.BF16).value))
        if settings.nodes:
            os.environ.setdefault(VARIABLE, FEWER_HOPS)
        from service.address import check_address
        from service.opening import begin_opening
        from service.operator_socket import check_socket

        check_address(settings)
        check_socket(settings)
        opening = begin_opening(settings)
        from service.server import Server  # takes about as long to import as the team to open

        Server(settings, opening).run()


def parse_size(text: str | None) -> int | None:
    """'2GiB' in bytes."""
    from service.config import parse_bytes

    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(f"--kv-memory {text}: it must be {error}") from None


def container(model: str, cache: Path, quant: str) -> Path:
    """The file of a path or name; what is to be known about it goes to stderr."""
    from ops.models import resolve

    with progress_bar("converting the model, once") as progress:
        resolved = resolve(model, cache=cache, quant=quant, progress=progress)
    if resolved.note:
        print(f"colibri: {resolved.note}", file=sys.stderr)
    return resolved.path
