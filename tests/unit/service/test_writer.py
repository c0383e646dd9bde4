"""Writes that are driven by callbacks instead of a task."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from service.streams import Writer


class Transport:
    """Takes a message when told to."""

    def __init__(self) -> None:
        self.taken: list[object] = []
        self.room: list[asyncio.Future[None]] = []

    async def write(self, message: object) -> None:
        for _ in range(2):
            self.room.append(asyncio.get_running_loop().create_future())
            await self.room[-1]
        self.taken.append(message)

    def give_room(self) -> None:
        self.room[-1].set_result(None)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def test_a_message_is_begun_at_once_and_taken_later() -> None:
    async def work() -> None:
        transport = Transport()
        writer = Writer(transport.write)
        assert writer.idle()
        writer.start("one")
        assert not writer.idle()
        assert writer.seconds >= 0
        transport.give_room()
        assert not writer.idle()
        transport.give_room()
        assert writer.idle()
        assert writer.seconds == 0
        assert transport.taken == ["one"]

    run(work())


def test_whoever_waits_is_called_when_the_transport_has_room() -> None:
    async def work() -> None:
        transport, called = Transport(), asyncio.Event()
        writer = Writer(transport.write)
        writer.start("one")
        writer.then(called.set)
        transport.give_room()
        await called.wait()
        waiting = asyncio.create_task(writer.finish())
        await asyncio.sleep(0)
        assert not writer.idle()
        transport.give_room()
        await waiting
        assert transport.taken == ["one"]

    run(work())


def test_a_write_that_does_not_wait_is_over_at_once() -> None:
    async def work() -> None:
        taken: list[object] = []

        async def write(message: object) -> None:
            taken.append(message)

        writer = Writer(write)
        writer.start("one")
        assert writer.idle()
        await writer.finish()
        assert taken == ["one"]

    run(work())


def test_a_failed_write_is_told_where_it_is_waited_for() -> None:
    async def work() -> None:
        transport = Transport()
        writer = Writer(transport.write)
        writer.start("one")
        transport.room[-1].set_exception(ConnectionError("gone"))
        with pytest.raises(ConnectionError):
            writer.idle()
        assert writer.idle()

    run(work())


def test_what_was_begun_is_ended_also_when_nobody_waits_any_more() -> None:
    async def work() -> None:
        transport = Transport()
        writer = Writer(transport.write)
        writer.start("one")
        writer.abandon()
        for _ in range(2):
            transport.give_room()
            await asyncio.sleep(0)
        assert transport.taken == ["one"]
        writer.start("two")
        writer.abandon()
        transport.room[-1].set_exception(ConnectionError("gone"))
        await asyncio.sleep(0)
        assert writer.idle()

    run(work())
