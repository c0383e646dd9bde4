"""The network of the tests themselves: what it cuts is cut, and nothing of it is left when its maker is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fault.harness import alive, limit, wait_for
from tests.multinode.net import ROOT, Network, Place

pytestmark = pytest.mark.multinode
PORT = 7000


@contextlib.contextmanager
def echo(place: Place) -> Iterator[None]:
    """Sends back what comes to PORT of a place, for one connection after the other."""
    server = place.socket()
    server.bind(("0.0.0.0", PORT))
    server.listen()

    def serve() -> None:
        with contextlib.suppress(OSError):  # shut down
            while True:
                connection, _ = server.accept()
                with connection:
                    while data := connection.recv(65536):
                        connection.sendall(data)

    thread = threading.Thread(target=serve, name="echo")
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def ask(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    answer = b""
    while len(answer) < len(data):
        answer += connection.recv(65536)
    return answer


def namespaces_in_use() -> set[Path]:
    """Network namespaces of all processes."""
    found = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended since
            found.add(Path(f"/proc/{pid}/ns/net").readlink())
    return found


@pytest.fixture
def pair(network: Network) -> Iterator[tuple[Place, Place]]:
    a, b = network.place("a"), network.place("b")
    with echo(b):
        yield a, b
        network.heal(b)


def test_places_reach_each_other(pair: tuple[Place, Place]) -> None:
    a, b = pair
    with a.connect(b.address, PORT, timeout=5) as connection:
        assert ask(connection, b"hello") == b"hello"


@pytest.mark.parametrize(("to", "back"), [(True, True), (True, False), (False, True)])
def test_cut_is_silent_and_heals(network: Network, pair: tuple[Place, Place], to: bool, back: bool) -> None:
    a, b = pair
    with a.connect(b.address, PORT, timeout=5) as connection:
        assert ask(connection, b"before") == b"before"
        network.cut(b, to=to, back=back)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            ask(connection, b"during")
        with pytest.raises(TimeoutError):
            a.connect(b.address, PORT, timeout=0.2)
        network.heal(b)
        connection.settimeout(5)
        assert connection.recv(65536) == b"during"  # sent again by TCP


def test_refusal_is_said(network: Network, pair: tuple[Place, Place]) -> None:
    a, b = pair
    network.cut(b, how="unreachable")
    with pytest.raises(OSError, match="unreachable"):
        a.connect(b.address, PORT, timeout=5)


def test_slow_link_is_slow(network: Network, pair: tuple[Place, Place]) -> None:
    a, b = pair
    network.slow(b, kbit=4000)  # half a megabyte a second
    with a.connect(b.address, PORT, timeout=5) as connection:
        begin = time.monotonic()
        assert len(ask(connection, bytes(200_000))) == 200_000
        assert time.monotonic() - begin > 0.15  # 64 kB at once, the rest at that rate, each way


def test_names_mean_places(network: Network, pair: tuple[Place, Place], tmp_path: Path) -> None:
    a, b = pair
    program = "import socket; print(sorted(x[4][0] for x in socket.getaddrinfo('nodes', 1, proto=socket.IPPROTO_TCP)))"
    network.names({"nodes": [a, b]})
    assert a.popen([sys.executable, "-c", program], log=tmp_path / "log").wait(20) == 0
    assert (tmp_path / "log").read_text() == f"{[a.address, b.address]}\n"


MAKER = """
import os, signal, sys; from pathlib import Path; from tests.multinode.cluster import Cluster; from tests.multinode.net import Network
folder, model = map(Path, sys.argv[1:]); network = Network(folder); cluster = Cluster(network, folder)
running, stopped = [cluster.server(name, model=model, workers=1)[0] for name in "ab"]
os.kill(stopped.pid, signal.SIGSTOP)
print(*[process.pid for server in (running, stopped) for process in server.tree()], flush=True)
sys.stdin.read()
"""


def test_killed_maker_leaves_nothing(tmp_path: Path, small_model: Path) -> None:
    """Neither servers, one of them stopped, nor their workers, nor namespaces, nor anything in our own."""
    outside = Path("/proc/self/ns/net").readlink()
    links = set(os.listdir("/sys/class/net"))
    command = [sys.executable, "-c", MAKER, str(tmp_path), str(small_model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True) as maker:
        assert maker.stdout is not None
        pids = [int(word) for word in maker.stdout.readline().split()]
        assert len(pids) == 4
        keepers = [child.pid for child in psutil.Process(maker.pid).children(recursive=True)]
        spaces = {Path(f"/proc/{pid}/ns/net").readlink() for pid in keepers}
        assert len(spaces) == 4  # the router's, those of two servers and of their tests
        assert outside not in spaces
        maker.send_signal(signal.SIGKILL)
    wait_for(lambda: not alive([*pids, *keepers]), seconds=limit(10), what="all processes have ended")
    assert not namespaces_in_use() & spaces
    made = set(os.listdir("/sys/class/net")) - links
    assert not [link for link in made if link.startswith("to")]  # others may have made some of theirs
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
