"""`colibri node`."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from ops.commands.logits import KvFormat
from ops.commands.serve import Load, LogLevel, Placement, container, parse_size


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(
        help="Compute a share of a model's experts, or some of its layers, for front ends until SIGTERM or Ctrl-C. "
        "Every option is also read from COLIBRI_<OPTION>."
    )
    def node(
        model: Annotated[str, typer.Argument(metavar="MODEL", help="The .colibri file that front ends serve, or demo, tiny or random.")],
        experts: Annotated[str | None, typer.Option(help="Experts of every layer to hold, such as 0-31,40.")] = None,
        share: Annotated[str | None, typer.Option(help="Or a part of them, such as 2/4; auto: what front ends assign.")] = None,
        layers: Annotated[str | None, typer.Option(help="Or layers to run whole, attention and KV cache included, such as 16-31.")] = None,
        name: Annotated[str | None, typer.Option(help="Name of this node, the same after a restart (the host's).")] = None,
        host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
        port: Annotated[int | None, typer.Option(help="Port (50061); 0 takes a free one.")] = None,
        tls_cert: Annotated[str | None, typer.Option(help="This node's certificate, PEM; needs the next two.")] = None,
        tls_key: Annotated[str | None, typer.Option(help="Its key.")] = None,
        tls_ca: Annotated[str | None, typer.Option(help="The authority that signs front ends' certificates.")] = None,
        insecure: Annotated[
            bool | None, typer.Option("--insecure/--no-insecure", help="Let other machines call unencrypted (no).")
        ] = None,
        load: Annotated[Load | None, typer.Option(help="Map the file, copy the share to memory, or auto (auto).")] = None,
        placement: Annotated[Placement | None, typer.Option(help="Which weights lie on which NUMA node (auto).")] = None,
        kv_memory: Annotated[str | None, typer.Option(help="KV cache of the layers, for all front ends, such as 4GiB (planned).")] = None,
        kv_format: Annotated[KvFormat | None, typer.Option(help="Of that cache, as the front ends have it (bf16).")] = None,
        workers_per_node: Annotated[int | None, typer.Option(help="Worker processes per NUMA node; 0 computes in this process.")] = None,
        threads_per_worker: Annotated[int | None, typer.Option(help="Lanes of each worker.")] = None,
        metrics_host: Annotated[str | None, typer.Option(help="Address of the Prometheus endpoint (127.0.0.1).")] = None,
        metrics_port: Annotated[int | None, typer.Option(help="Port of the Prometheus endpoint; none by default.")] = None,
        idle_timeout: Annotated[float | None, typer.Option(help="Seconds that a caller with an open stream may be silent (600).")] = None,
        drain_grace: Annotated[float | None, typer.Option(help="Seconds front ends may take to leave after SIGTERM (30).")] = None,
        log_level: Annotated[LogLevel, typer.Option(help="What goes to stderr.")] = LogLevel.INFO,
    ) -> None:
        from service.config import cache_dir
        from service.node.config import NodeConfig

        settings = NodeConfig.from_env(
            model=container(model, cache_dir(), "bf16"),
            experts=experts,
            share=share,
            layers=layers,
            kv_memory=parse_size(kv_memory),
            kv_format=kv_format and kv_format.value,
            name=name,
            host=host,
            port=port,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_ca=tls_ca,
            insecure=insecure,
            load=load and load.value,
            placement=placement and placement.value,
            workers_per_node=workers_per_node,
            threads_per_worker=threads_per_worker,
            metrics_host=metrics_host,
            metrics_port=metrics_port,
            idle_timeout=idle_timeout,
            drain_grace=drain_grace,
        )
        logging.basicConfig(level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        from service.node.server import NodeServer

        NodeServer(settings).run()
