"""Work between the steps of a real server: tokens go on beside a flood of it, and nobody waits for an engine that is gone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.client import generate_request
from service.faults import EngineFault, QueueFull
from tests.integration.serving import PATIENCE, Serving, serving, until


@pytest.fixture
def server(tiny_model: Path) -> Iterator[Serving]:
    with serving(tiny_model) as running:
        yield running


def spin() -> str:
    """A piece of a millisecond; the name of the thread it ran on."""
    end = time.perf_counter() + 0.001
    while time.perf_counter() < end:
        pass
    return threading.current_thread().name


def test_a_piece_runs_on_the_engines_thread_whether_it_idles_or_steps(server: Serving) -> None:
    engine = server.server.default.engine
    assert asyncio.run_coroutine_threadsafe(engine.between(spin), server.loop).result(PATIENCE) == "engine"
    server.gate.shut()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.client.complete, generate_request("a", max_tokens=8, ignore_eos=True))
        until(lambda: server.gate.entered, "a step runs")
        waiting = asyncio.run_coroutine_threadsafe(engine.between(spin), server.loop)
        assert not waiting.done()
        server.gate.open()
        assert waiting.result(PATIENCE) == "engine"
        assert answer.result().finish.usage.completion_tokens == 8
    server.wait_idle()


def test_tokens_go_on_while_pieces_never_end(server: Serving) -> None:
    engine, over = server.server.default.engine, threading.Event()
    done = 0

    async def flood() -> None:
        nonlocal done
        while not over.is_set():
            await engine.between(spin)
            done += 1

    alone = server.client.complete(generate_request("a", max_tokens=64, ignore_eos=True, seed=1))
    floods = [asyncio.run_coroutine_threadsafe(flood(), server.loop) for _ in range(64)]
    until(lambda: done > 64, "the flood runs")
    steps, pieces = server.gate.entered, done
    beside = server.client.complete(generate_request("a", max_tokens=64, ignore_eos=True, seed=1))
    steps, pieces = server.gate.entered - steps, done - pieces
    over.set()
    for each in floods:
        each.result(PATIENCE)
    assert beside.text == alone.text
    assert pieces >= steps // 2, "the flood goes on too"
    server.wait_idle()


def test_pieces_that_wait_are_bounded_and_a_cancelled_one_never_runs(server: Serving) -> None:
    engine, ran = server.server.default.engine, []
    server.gate.shut()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.client.complete, generate_request("a", max_tokens=2, ignore_eos=True))
        until(lambda: server.gate.entered, "a step runs")
        waiting = [asyncio.run_coroutine_threadsafe(engine.between(lambda n=n: ran.append(n)), server.loop) for n in range(257)]  # type: ignore[misc]
        with pytest.raises(QueueFull):
            waiting[256].result(PATIENCE)
        waiting[0].cancel()
        until(lambda: waiting[0].cancelled(), "it is called off")
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server.loop).result(PATIENCE)
        server.gate.open()
        waiting[255].result(PATIENCE)
        answer.result()
    assert ran == list(range(1, 256))


def test_a_stopped_engine_answers_pieces_at_once(server: Serving) -> None:
    engine = server.server.default.engine
    assert engine.stop()
    with pytest.raises(EngineFault, match="stopped"):
        asyncio.run_coroutine_threadsafe(engine.between(spin), server.loop).result(PATIENCE)
