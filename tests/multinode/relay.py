"""Unix sockets that lead into places: the sockets of a gRPC channel are made by threads that nobody but gRPC can move there."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import TypeVar

from tests.multinode.net import Place

CONNECT_S = 2.0
_T = TypeVar("_T")


class Relays:
    """Relays on a loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays")
        self._thread.start()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, path: Path, *, source: Place, address: str, port: int) -> str:
        """Carries what connects to path from the place `source` to address and port. Returns the gRPC target."""

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(_carry(reader, writer, source, address, port))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._servers.append(self._call(asyncio.start_unix_server(accept, path)))
        return f"unix:{path}"

    def close(self) -> None:
        """Ends them all."""
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _call(self, work: Coroutine[None, None, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: Place, address: str, port: int) -> None:
    with contextlib.closing(writer):
        try:
            connection = await asyncio.to_thread(source.connect, address, port, timeout=CONNECT_S)
        except OSError:
            return  # our end closes: the caller's connection fails as it would there
        connection.setblocking(False)
        far_reader, far_writer = await asyncio.open_connection(sock=connection)
        with contextlib.closing(far_writer):
            pumps = [asyncio.create_task(_pump(reader, far_writer)), asyncio.create_task(_pump(far_reader, writer))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
