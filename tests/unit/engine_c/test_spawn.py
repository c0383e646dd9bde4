"""Starting processes without waiting for them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from engine_c import EngineError
from engine_c.spawn import spawn

C_LIBRARYS = 1 << 31 | 1 << 32
"""Signals 32 and 33 are the C library's own: nobody else can change them."""

STOPPER = """
import os, signal, sys, time
parent, held = sys.argv[1], []
print("watching", flush=True)
while True:
    for child in open(f"/proc/{parent}/task/{parent}/children").read().split():
        if int(child) != os.getpid() and child not in [pid for pid, _ in held]:
            os.kill(int(child), signal.SIGSTOP)
            held.append((child, time.monotonic()))
    for child, since in held:
        if time.monotonic() - since > 1:
            try:
                os.kill(int(child), signal.SIGCONT)
            except ProcessLookupError:
                pass
"""


def run(argv: Sequence[str], *, keep: Sequence[int] = ()) -> tuple[int, str]:
    """The exit code and what was printed."""
    reading, writing = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    pid, pidfd = spawn(argv, stdin=nothing, output=writing, keep=keep)
    os.close(writing)
    os.close(nothing)
    with open(reading) as output:
        text = output.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(pidfd)
    return code, text


def test_a_program_runs_with_its_words_and_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_TEST_WORD", "humming")
    code, text = run(["/bin/sh", "-c", 'echo "$1 $COLIBRI_TEST_WORD"; pwd; exit 7', "sh", "a b"])
    assert (code, text) == (7, "a b humming\n/\n")


def test_it_leads_a_group_in_our_session_with_no_signal_held_back_or_ignored() -> None:
    code, text = run(["/bin/cat", "/proc/self/stat", "/proc/self/status"])
    assert code == 0
    pid, _, _, _, group, session, *_ = text.splitlines()[0].split()
    assert (group, session) == (pid, str(os.getsid(0)))
    masks = {name: int(value, 16) for name, _, value in (line.partition(":") for line in text.splitlines()) if name in ("SigBlk", "SigIgn")}
    assert masks["SigBlk"] == 0
    assert masks["SigIgn"] & ~C_LIBRARYS == 0


def test_only_the_descriptors_named_stay_open() -> None:
    kept, other = os.pipe()
    os.set_inheritable(other, True)
    code, text = run(["/bin/sh", "-c", "ls /proc/$$/fd"], keep=[kept])
    os.close(kept)
    os.close(other)
    assert code == 0
    assert {int(word) for word in text.split()} <= {0, 1, 2, kept, 10, 255}, "10 and 255 are the shell's own"
    assert kept in {int(word) for word in text.split()}


def test_a_program_that_is_not_there_says_so_and_exits_with_127() -> None:
    assert run(["/no/such/program"]) == (127, "the worker's program cannot be run\n")


def test_standard_descriptors_cannot_be_kept() -> None:
    with pytest.raises(EngineError, match="descriptor 1 cannot be kept open"):
        spawn(["/bin/true"], stdin=0, output=1, keep=[1])


def test_a_child_stopped_before_its_program_runs_holds_nobody_up() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    children: list[tuple[int, int]] = []
    with subprocess.Popen([sys.executable, "-c", STOPPER, str(os.getpid())], stdout=subprocess.PIPE) as stopper:
        assert stopper.stdout is not None
        stopper.stdout.readline()
        longest = 0.0
        for _ in range(40):
            began = time.monotonic()
            children.append(spawn(["/bin/true"], stdin=nothing, output=nothing))
            longest = max(longest, time.monotonic() - began)
        for pid, pidfd in children:
            assert select.select([pidfd], [], [], 30)[0], "it goes on once it is let"
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            os.close(pidfd)
        stopper.kill()
    os.close(nothing)
    assert longest < 0.9, "the stopper lets go after a second"
