"""Whatever comes to an open port, who asks properly goes on being answered, and nothing of it stays."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from service.client import Client
from tests.fault.harness import limit, wait_for
from tests.multinode.cluster import cluster
from tests.multinode.garbage import HELLO, MANY, SAID, Visit, crowd, hang_up, say, visits
from tests.multinode.net import Network, Place
from tests.multinode.processes import PORT, Process

pytestmark = pytest.mark.multinode
GROWTH = 64 << 20  # bytes: what gRPC's arenas may keep of thousands of connections


@dataclass
class Listener:
    """A process with an open port, asked from the place `tests`."""

    process: Process
    source: Place
    target: str

    @property
    def address(self) -> str:
        return self.process.place.address

    @property
    def visit(self) -> Visit:
        return visits(self.source, self.address, PORT)

    def serves(self) -> None:
        """A new client is answered."""
        assert self.process.running, self.process.says()
        with Client(self.target, timeout=limit(10)) as client:
            assert client.detokenize(client.tokenize("still there")) == "still there"

    def connections(self) -> int:
        """Its open sockets."""
        links: Counter[str] = Counter()
        for fd in os.listdir(f"/proc/{self.process.pid}/fd"):
            try:
                links[os.readlink(f"/proc/{self.process.pid}/fd/{fd}").split(":")[0]] += 1
            except FileNotFoundError:  # closed since
                continue
        return links["socket"]


@pytest.fixture(scope="module")
def listener(network: Network, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    with cluster(network, tmp_path_factory.mktemp("garbage")) as made:
        process, target = made.server("server", model=small_model)
        yield Listener(process, network.place("tests"), target)


@pytest.fixture(autouse=True)
def goes_on(listener: Listener) -> Iterator[None]:
    """Before and after each test it serves; after it, no connection is left of those that were made."""
    listener.serves()
    before = listener.connections()
    yield
    listener.serves()
    wait_for(lambda: listener.connections() <= before + 1, seconds=limit(10), what="connections are closed")


@pytest.mark.parametrize("what", SAID)
def test_garbage_is_shrugged_off(listener: Listener, what: str) -> None:
    say(listener.visit, SAID[what])


def test_connections_that_are_reset(listener: Listener) -> None:
    for _ in range(500):
        with listener.visit() as connection:
            hang_up(connection)


@pytest.mark.parametrize("first", [b"", HELLO[:11], HELLO], ids=["silent", "half a preface", "idle"])
def test_thousands_of_connections_at_once(listener: Listener, first: bytes) -> None:
    size = psutil.Process(listener.process.pid).memory_info().rss
    with crowd(listener.source, listener.address, PORT, count=MANY, first=first):
        listener.serves()
    assert psutil.Process(listener.process.pid).memory_info().rss - size < GROWTH * (1 + MANY // 1000)


def test_half_open_connections(network: Network, listener: Listener) -> None:
    """The other side has gone without a word: its segments come from nowhere any more."""
    source = network.place("gone")
    with crowd(source, listener.address, PORT, count=100, first=HELLO):
        network.cut(source)
        listener.serves()
        network.heal(source)
