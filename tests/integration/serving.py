"""A server in this process, on a loop of its own, for tests that look inside; and one in a process of its own, for those about signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import psutil
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_status import rpc_status

from engine_c import Remote, SeqResult, SeqWork, Session, StepStats
from service.client import Client
from service.config import ServeConfig
from service.plan import SchedulerStats
from service.server import Server

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 30.0  # seconds that anything may take before a test gives up
_T = TypeVar("_T")


def until(condition: Callable[[], _T], what: str, *, timeout: float = PATIENCE) -> _T:
    """Polls until the condition is true and returns what it gave."""
    end = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not in {timeout:.0f} s: {what}")
        time.sleep(0.002)
    return found


class Gate:
    """The real session behind a gate: a step waits while it is shut, and can be made to fail."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open = threading.Event()
        self._open.set()
        self.entered = 0  # steps begun
        self.fault: Callable[[int], Exception | None] = lambda _: None

    def step(self, work: Sequence[SeqWork], *, tell: int = -1, remote: Remote | None = None) -> tuple[list[SeqResult], StepStats]:
        self.entered += 1
        if not self._open.wait(PATIENCE):
            raise AssertionError("nobody opened the gate")
        error = self.fault(self.entered)
        if error is not None:
            raise error
        return self._session.step(work, tell=tell, remote=remote)

    def set_remote(self, experts: npt.NDArray[np.bool_] | None, layers: Sequence[tuple[int, int]] = ()) -> None:
        self._session.set_remote(experts, layers)

    def __getattr__(self, name: str) -> object:
        return getattr(self._session, name)

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


@dataclass
class Serving:
    """A running server and a client of it."""

    server: Server
    client: Client
    loop: asyncio.AbstractEventLoop
    gate: Gate

    @property
    def target(self) -> str:
        return self.server.target

    def stop_at_once(self) -> None:
        """On the loop: as two signals would."""
        self.server.request_stop()
        self.server.request_stop()

    def wait_idle(self) -> None:
        """Waits until no call runs, no request is left and no KV block is held; checks the books."""
        until(lambda: self.server.default.desk.calls == 0, "all calls are over")
        until(lambda: self.stats().running + self.stats().waiting == 0, "all requests have left")
        until(lambda: self.stats().pool.held == 0, "all KV blocks are back")
        self.server.default.engine.check_integrity()

    def stats(self) -> SchedulerStats:
        return self.server.default.engine.stats()[0]


@contextlib.contextmanager
def serving(model: Path, **settings: object) -> Iterator[Serving]:
    """A server in this process, computing in this process unless told otherwise."""
    usual = {"model": model, "port": 0, "kv_memory": 16 << 20, "workers_per_node": 0, "operator_socket": "none"}
    config = ServeConfig(**(usual | settings))  # type: ignore[arg-type]
    started: list[Serving | BaseException] = []
    ready = threading.Event()

    async def live() -> None:
        server = Server(config)
        try:
            await server.startup()
            gate = server.default.engine._session = Gate(server.default.team.session)
            started.append(Serving(server, Client(server.target, timeout=PATIENCE), asyncio.get_running_loop(), gate))
        except BaseException as error:
            started.append(error)
            return
        finally:
            ready.set()
        await server.serve()
        await server.shutdown()

    thread = threading.Thread(target=lambda: asyncio.run(live()), name="server")
    thread.start()
    assert ready.wait(PATIENCE)
    handle = started[0]
    if isinstance(handle, BaseException):
        thread.join()
        raise handle
    try:
        yield handle
    finally:
        handle.gate.fault = lambda _: None
        handle.gate.open()
        handle.client.close()
        with contextlib.suppress(RuntimeError):  # the test itself may have ended it
            handle.loop.call_soon_threadsafe(handle.stop_at_once)
        thread.join(PATIENCE)
        assert not thread.is_alive()


@dataclass
class Process:
    """A server in a process of its own."""

    popen: subprocess.Popen[bytes]
    target: str
    log: Path

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.popen.pid).children(recursive=True)


@contextlib.contextmanager
def serving_process(model: Path, folder: Path, **settings: object) -> Iterator[Process]:
    """Starts `Server.run` in a process, listening on a socket in `folder`."""
    socket, log = folder / "colibri.sock", folder / "server.log"
    values = {"model": model, "unix_socket": socket, "kv_memory": "16M", "operator_socket": "none"} | settings
    environ = os.environ | {f"COLIBRI_{name.upper()}": str(value) for name, value in values.items()}
    program = "import logging; from service.config import ServeConfig; from service.server import Server\n"
    program += "logging.basicConfig(level='INFO'); Server(ServeConfig.from_env()).run()"
    with log.open("wb") as out:
        popen = subprocess.Popen([sys.executable, "-W", "error", "-c", program], cwd=ROOT, env=environ, stdout=out, stderr=out)
    try:
        until(lambda: popen.poll() is not None or b"serving" in log.read_bytes(), "the server is up")
        assert popen.poll() is None, log.read_text()
        yield Process(popen, f"unix:{socket}", log)
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.wait(PATIENCE)


def fields_at_fault(error: grpc.RpcError) -> list[str]:
    """The fields a BadRequest detail names."""
    return [violation.field for violation in detail(error, BadRequest).field_violations]


def reason(error: grpc.RpcError) -> str:
    """The reason of the ErrorInfo detail."""
    return str(detail(error, ErrorInfo).reason)


def retry_seconds(error: grpc.RpcError) -> float:
    """The delay of the RetryInfo detail."""
    return float(detail(error, RetryInfo).retry_delay.ToMilliseconds()) / 1000


def detail(error: grpc.RpcError, kind: type[_T]) -> _T:
    """The detail of this kind; there must be one."""
    status = rpc_status.from_call(error)
    assert status is not None, f"no details with {error}"
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):  # type: ignore[attr-defined]
            message = kind()
            packed.Unpack(message)
            return message
    raise AssertionError(f"no {kind.__name__} with {error}")
