"""The word `tiny` wherever a command takes a model, and `colibri serve tiny` as a user has it: offline, deterministic."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from service.client import Client, generate_request
from workers.balance import plan_balance

CLI = [sys.executable, "-m", "ops.cli"]
DEADLINE = 60.0
TEXTS = Path(__file__).parents[2] / "ops" / "tiny" / "texts"
PROMPTS = ("And it came to pass", "ORSINO.\n", "def ")


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, check=False, timeout=DEADLINE)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of `tiny` with one worker process."""
    where = f"{tmp_path_factory.mktemp('socket')}/s"
    options = ["--unix-socket", where, "--workers-per-node", "1", "--threads-per-worker", "1", "--kv-memory", "64MiB"]
    process = subprocess.Popen([*CLI, "serve", "tiny", *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + DEADLINE
        while call("health", f"unix:{where}").returncode != 0:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "not serving in time"
        yield f"unix:{where}"
    finally:
        process.kill()
        process.communicate()


def answers(client: Client, prompt: str, *, temperature: float | None = None, seed: int | None = None) -> str:
    return client.complete(generate_request(prompt, max_tokens=48, temperature=temperature, seed=seed)).text


def test_it_serves_and_gives_the_same_answer_each_time(target: str) -> None:
    with Client(target, timeout=DEADLINE) as client:
        for prompt in PROMPTS:
            greedy = answers(client, prompt, temperature=0)
            assert len(greedy) > 40
            assert answers(client, prompt, temperature=0) == greedy
            sampled = answers(client, prompt, seed=7)
            assert answers(client, prompt, seed=7) == sampled
            assert sampled != greedy


def test_it_goes_on_in_the_kind_of_text_it_is_given(target: str) -> None:
    with Client(target, timeout=DEADLINE) as client:
        assert "self" in answers(client, "class Reader:\n    def __init__(", temperature=0)
        assert "the LORD" in answers(client, "And Moses said unto the people, Thus saith", temperature=0)


def test_chat_goes_on_from_what_was_said(target: str) -> None:
    with Client(target, timeout=DEADLINE) as client:
        said = client.complete(generate_request(messages=[("user", "And the king said")], max_tokens=48, temperature=0))
        assert said.text == answers(client, "And the king said", temperature=0)


COMMANDS = [("inspect", "tiny"), ("verify", "tiny"), ("bench", "decode", "tiny", "--samples", "1", "--prompt", "4")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_commands_take_the_word(command: tuple[str, ...]) -> None:
    done = call(*command)
    assert done.returncode == 0, done.stderr
    assert "tiny" in done.stdout


def test_logits_take_the_word(tmp_path: Path) -> None:
    out = tmp_path / "tiny.npz"
    done = call("logits", "tiny", "--tokens", "0,5,6", "--out", str(out))
    assert done.returncode == 0, done.stderr
    with np.load(out) as arrays:
        assert arrays["logits"].shape == (3, 4096)
        assert arrays["experts"].shape == (4, 3, 2)


@pytest.mark.parametrize("kind", ["bible", "python", "shakespeare"])
def test_its_experts_are_packed_on_four_nodes_as_well_as_exhaustive_search_does(kind: str) -> None:
    text = (TEXTS / f"{kind}.txt").read_text(encoding="utf-8")[:2400]
    routed = call("route", text, "--model", "tiny", "--json")
    assert routed.returncode == 0, routed.stderr
    # Nodes are alike: the first expert may as well be on node 0.
    homes = np.stack(np.meshgrid(*[np.arange(4)] * 7, indexing="ij"), axis=-1).reshape(-1, 7)
    for layer in json.loads(routed.stdout)["layers"]:
        load = np.bincount(np.ravel(layer["experts"]), minlength=8).astype(float)
        plan = plan_balance([load.tolist()], 1, range(4), [[[expert // 2] for expert in range(8)]], min_gain=0.0, horizon_s=1e12)
        (copies,) = plan.copies
        largest = max(sum(load[expert] for expert in range(8) if copies[expert] == (node,)) for node in range(4))
        best = np.max([(homes == node) @ load[1:] + (node == 0) * load[0] for node in range(4)], axis=0).min()
        assert largest <= 1.02 * best
