"""Where agents go, what they run, and that one is started again; all without Ray but the placing itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from ops.cli import run
from ops.ray.agent import Agent, AgentSpec, node_command

FOREVER = (sys.executable, "-c", "import signal; signal.pause()")


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def test_the_command_line_of_a_share() -> None:
    made = node_command(("colibri",), "m.colibri", share=(2, 3), name="ray-2", host="0.0.0.0", port=50062, extra=("--lanes=4",))
    assert " ".join(made) == "colibri node m.colibri --share 2/3 --name ray-2 --host 0.0.0.0 --port 50062 --lanes=4"


def test_a_killed_process_is_started_again_and_a_stopped_agent_leaves_none() -> None:
    agent = Agent(AgentSpec("a", 1, FOREVER))
    until(lambda: agent.state()[0], "it runs")
    first = agent.state()[0]
    os.kill(first, signal.SIGKILL)
    until(lambda: agent.state()[0] not in (0, first), "it runs again")
    pid, restarts, error = agent.state()
    assert (restarts, error) == (1, "its process was ended by SIGKILL")
    agent.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert agent.state()[0] == 0


def test_a_program_that_ends_at_once_is_tried_again_and_its_end_is_told() -> None:
    agent = Agent(AgentSpec("a", 1, (sys.executable, "-c", "raise SystemExit(3)")))
    until(lambda: agent.state()[1] >= 1, "it is tried again")
    assert agent.state()[2] == "its process ended with code 3"
    agent.stop()


def test_ports_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ray", "up", "m.colibri", "--nodes", "3", "--port", "65534"]) == 2
    assert "up to 65536" in capsys.readouterr().err
