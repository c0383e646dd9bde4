"""Ends in words, and what a worker asks of the system."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from workers import worker_main
from workers.plan import WorkerSpec
from workers.process import IMPORT_PATHS, command, curable, describe_end

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (1, "exited with code 1"),
        (-9, "killed by SIGKILL"),
        (-11, "killed by SIGSEGV"),
        (-64, "killed by SIGRTMAX"),
        (-63, "killed by signal 63"),
        (worker_main.EXIT_MISMATCH, "exited with code 3: its segments do not fit"),
        (worker_main.EXIT_LANE, "exited with code 4: a lane failed"),
        (worker_main.EXIT_ORPHAN, "exited with code 5: it lost its front end"),
    ],
)
def test_ends_are_told_in_words(code: int, words: str) -> None:
    assert describe_end(code) == words


def test_only_a_sigkill_is_blamed_on_the_oom_killer() -> None:
    assert "out of memory" in describe_end(-signal.SIGKILL, oom=True)
    assert "out of memory" not in describe_end(-signal.SIGSEGV, oom=True)


def test_only_segments_that_do_not_fit_are_hopeless() -> None:
    assert [code for code in range(-64, 256) if not curable(code)] == [worker_main.EXIT_MISMATCH]


def test_the_command_line_is_what_the_worker_parses() -> None:
    spec = WorkerSpec(index=3, node=1, lanes=(4, 5), cpus=(), node_cpus=(8, 9), memory_node=None)
    words = command(spec, control=10, model_table=11, team_fd=12, arena_fd=13)
    options = worker_main.parse(words[4:])
    assert options["name"] == "colibri-w3"
    assert (options["control"], options["model-table"], options["team"], options["arena"]) == ("10", "11", "12", "13")
    assert worker_main.numbers(options["lanes"]) == [4, 5]
    assert worker_main.numbers(options["cpus"]) == []
    assert worker_main.numbers(options["node-cpus"]) == [8, 9]
    assert worker_main.numbers(options["memory-node"]) == []


def python(code: str) -> str:
    """Runs code in a process of its own, whose policies it may change."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def test_a_memory_policy_is_set_or_its_refusal_told() -> None:
    said, policy = python(
        "from workers.numa import prefer_memory\n"
        "refused = prefer_memory(0)\n"
        "print(refused or 'set', open('/proc/self/numa_maps').readline().split()[1], sep='|')"
    ).split("|")
    assert (said, policy) == ("set", "prefer:0") or said.startswith("set_mempolicy to NUMA node 0: "), (said, policy)


def test_pinning_to_a_cpu_that_may_not_be_used_is_told() -> None:
    assert python("from workers.numa import run_on; print(run_on([1023]))") == "CPUs 1023: Invalid argument"


def test_a_worker_imports_neither_dataclasses_nor_what_only_the_front_end_needs() -> None:
    source = Path(worker_main.__file__).read_text()
    lines = [line.strip() for line in source.splitlines() if re.match(r"\s+(from|import) ", line)]
    assert any("engine_c" in line for line in lines), lines
    told = f"import sys\nsys.path += {list(IMPORT_PATHS)!r}\n" + "\n".join(lines) + "\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-I", "-S", "-c", told], check=True, capture_output=True, text=True).stdout.split()
    assert {"engine_c.lanes", "workers.sandbox"} <= set(loaded)
    assert not {"dataclasses", "engine_c.engine", "engine_c.structs", "numpy", "workers.plan"} & set(loaded)
