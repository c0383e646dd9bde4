"""`colibri node` with mutual TLS: who may call, and that strangers do no harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from colibri.v1 import node_pb2, node_pb2_grpc
from tests.integration.serving import PATIENCE
from tests.integration.test_node import Node, node_of
from tests.multinode.certificates import Authority, Pair

NAME = "DNS:node"
SOON = 3.0  # seconds in which a refused call must have ended


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.made(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def secure(ours: Authority, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    pair = ours.issue("node", names=NAME)
    with node_of(tiny_model, "--share", "1/2", *pair.node, log=tmp_path_factory.mktemp("log") / "log") as node:
        yield node


def describe(node: Node, credentials: grpc.ChannelCredentials | None, timeout: float) -> node_pb2.NodeDescription:
    if credentials is None:
        channel = grpc.insecure_channel(node.address)
    else:
        channel = grpc.secure_channel(node.address, credentials, [("grpc.ssl_target_name_override", "node")])
    with channel:
        return node_pb2_grpc.NodeStub(channel).Describe(node_pb2.DescribeRequest(), timeout=timeout)


def credentials(pair: Pair) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pair.ca.read_bytes(), pair.key.read_bytes(), pair.certificate.read_bytes())


def unencrypted(ours: Authority, folder: Path) -> None:
    return None


def no_certificate(ours: Authority, folder: Path) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(ours.certificate.read_bytes())


def of_strangers(ours: Authority, folder: Path) -> grpc.ChannelCredentials:
    pair = Authority.made(folder, "strangers").issue("front", names=NAME)
    return grpc.ssl_channel_credentials(ours.certificate.read_bytes(), pair.key.read_bytes(), pair.certificate.read_bytes())


def run_out(ours: Authority, folder: Path) -> grpc.ChannelCredentials:
    return credentials(ours.issue("late", names=NAME, days=-1))


@pytest.mark.parametrize("make", [unencrypted, no_certificate, of_strangers, run_out])
def test_only_those_with_our_authoritys_certificate_may_call(
    secure: Node, ours: Authority, tmp_path: Path, make: Callable[[Authority, Path], grpc.ChannelCredentials | None]
) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        describe(secure, make(ours, tmp_path), SOON)
    assert refusal.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert describe(secure, credentials(ours.issue("front", names=NAME)), PATIENCE).name == "n"
