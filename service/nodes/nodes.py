"""The nodes of a model as the rest of the service has them."""

from __future__ import annotations

import secrets
import socket
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from engine_c import ModelInfo, isa_name
from service.artifact import Artifact
from service.config import ConfigError, ServeConfig
from service.nodes.addresses import file_of, parse_places
from service.nodes.balancing import NodeBalancer
from service.nodes.legs import layers_of
from service.nodes.link import Identity, Link, Secrets
from service.nodes.member import Member
from service.nodes.pool import NodePool, PoolConfig
from service.nodes.remote import NodeRemote
from service.tls import TlsFiles, speaks_tls, why_refused
from workers.automatic import Keeper
from workers.automatic_config import Automatic, Loads

if TYPE_CHECKING:
    from collections.abc import Callable


class Nodes:
    """`remote` is the engine's thread's."""

    def __init__(self, pool: NodePool, remote: NodeRemote, balancer: NodeBalancer) -> None:
        self.pool = pool
        self.remote = remote
        self.balancer = balancer
        self._keeper: Keeper | None = None

    @property
    def members(self) -> list[Member]:
        """By name."""
        return sorted(self.pool.members.values(), key=lambda member: member.name)

    def keep_balanced(self, config: ServeConfig, counts: Callable[[], Loads]) -> None:
        """Lets experts move by themselves, if the settings want it. counts: the tokens each expert has had so far [layers][experts]."""
        if config.nodes_balance == "auto":
            self._keeper = Keeper(self.balancer, counts, Automatic(interval_s=config.rebalance_interval, replicas=None))

    def close(self) -> None:
        """Ends all streams and threads, once no step runs any more."""
        self.balancer.close()
        self.pool.close()
        if self._keeper is not None:
            self._keeper.close()


def open_nodes(config: ServeConfig, artifact: Artifact, info: ModelInfo, *, kv_blocks: int) -> Nodes:
    """Begins to look for the nodes of a model. ConfigError."""
    if config.layers_elsewhere and config.layers_elsewhere[-1][1] > info.layers:
        raise ConfigError(f"nodes_layers is {config.nodes_layers}, but {artifact.path} has {info.layers} layers, from 0 on")
    if not artifact.routed_layers and not config.nodes_layers:
        raise ConfigError(f"nodes is set, but {artifact.path} has no experts that nodes could compute: leave it out")
    places, by_name = parse_places(config.nodes)
    name = config.nodes_server_name or (places[0].host if by_name else "")
    ours, why_no_tls = _tls(config, name)
    experts_of = tuple(info.experts if layer in artifact.routed_layers else 0 for layer in range(info.layers))
    pool = NodePool(
        PoolConfig(
            places=places,
            by_name=by_name,
            file=file_of(config.nodes),
            identity=Identity(
                socket.gethostname(),
                artifact.name,
                artifact.digest,
                version("colibri"),
                isa_name(),
                instance=secrets.token_hex(8),
                kv_blocks=kv_blocks,
                kv_format=config.kv_format,
            ),
            dial=lambda address, key: Link(address, ours, key),
            why_no_tls=why_no_tls,
            experts=info.experts,
            experts_of=experts_of,
            timeout_s=config.nodes_timeout_ms / 1e3,
            resolve_s=config.nodes_resolve_s,
            replicas=config.nodes_replicas,
            redeal_s=config.nodes_redeal_s,
            slack=config.nodes_slack,
            elsewhere=layers_of(config.layers_elsewhere),
            otherwise=_otherwise(config),
        )
    )
    remote = NodeRemote(
        pool,
        hidden=info.hidden,
        fallback=config.nodes_fallback == "file",
        all_here=config.nodes_local_experts == "all",
        timeout_s=config.nodes_timeout_ms / 1e3,
        hedge_s=config.nodes_hedge_ms / 1e3,
    )
    here = config.nodes_local_experts == "all"
    expert_bytes = info.expert_bytes // max(1, sum(experts_of))
    balancer = NodeBalancer(pool.dealing, lambda: list(pool.members.values()), expert_bytes=expert_bytes, here=here)
    pool.start()
    return Nodes(pool, remote, balancer)


def _otherwise(config: ServeConfig) -> str:
    if config.nodes_local_experts == "all" and not config.nodes_layers:
        return ""
    from_file = config.nodes_fallback == "file" or config.nodes_local_experts == "all"
    return "computed here from the file" if from_file else "requests wait"


def _tls(config: ServeConfig, name: str) -> tuple[Secrets | None, Callable[[str], str]]:
    if not config.nodes_cert:
        return None, _why_not_plain
    cert, key, ca = (_read(path) for path in (config.nodes_cert, config.nodes_key, config.nodes_ca))
    theirs = "the authority that the node was started with (--tls-ca)"
    files = TlsFiles(config.nodes_cert, config.nodes_key, config.nodes_ca, name, theirs)
    return Secrets(cert, key, ca, name), partial(why_refused, files=files)


def _why_not_plain(address: str) -> str:
    return "it asks for TLS: set nodes_cert, nodes_key and nodes_ca" if speaks_tls(address) else ""


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; it is needed to reach nodes") from error
