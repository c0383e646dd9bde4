"""Wake-ups of grpc.aio are taken in together."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

from service.loop import ServerLoop


class Queue:
    """As grpc.aio's: takes one byte, then handles all that has happened."""

    def __init__(self, waking: socket.socket, wanted: int) -> None:
        self._waking = waking
        self._wanted = wanted
        self.handled: list[int] = []
        self.done = asyncio.Event()
        self.happened = 0

    def _handle_events(self) -> None:
        assert len(self._waking.recv(1)) == 1
        self.handled.append(self.happened)
        self.happened = 0
        if sum(self.handled) == self._wanted:
            self.done.set()

    def watch(self) -> None:
        asyncio.get_running_loop().add_reader(self._waking, self._handle_events)


def test_many_wake_ups_are_one_round_of_the_loop() -> None:
    async def work() -> None:
        waking, ringing = socket.socketpair()
        queue = Queue(waking, 7)
        queue.watch()
        for _ in range(7):
            queue.happened += 1
            ringing.send(b"1")
        await asyncio.wait_for(queue.done.wait(), 10)
        await asyncio.sleep(0)
        assert queue.handled == [7]
        asyncio.get_running_loop().remove_reader(waking)
        waking.close()
        ringing.close()

    with asyncio.Runner(loop_factory=ServerLoop) as runner:
        runner.run(work())


def test_it_knows_the_reader_of_the_grpc_that_is_installed(tmp_path: Path) -> None:
    program = f"""
import asyncio, grpc.aio
from service.loop import ServerLoop, is_grpc_reader
found = []
class Watched(ServerLoop):
    def add_reader(self, fd, callback, *args):
        found.append(is_grpc_reader(callback))
        super().add_reader(fd, callback, *args)
async def work():
    server = grpc.aio.server()
    server.add_insecure_port("unix:{tmp_path}/socket")
    await server.start()
    await server.stop(None)
with asyncio.Runner(loop_factory=Watched) as runner:
    runner.run(work())
assert found == [True], "grpc.aio wakes the loop in another way: service/loop.py has no effect any more"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
