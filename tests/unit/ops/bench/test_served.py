"""Reading a server's totals and its threads' CPU time."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from ops.bench.memory import share_of
from ops.bench.served import free_port, read_totals, thread_seconds

PAGE = """\
# HELP colibri_steps_total Steps done.
# TYPE colibri_steps_total counter
colibri_steps_total{model_name="m"} 12.0
colibri_step_seconds_total{model_name="m"} 1.5
colibri_expert_load_max_over_mean{layer="0",model_name="m"} 3.0
vllm:num_requests_running{model_name="m"} 1.0
colibri_lanes{model_name="m"} 2.0
"""


def test_totals_are_our_own_figures_without_further_labels() -> None:
    assert read_totals(PAGE) == {"steps": 12.0, "step_seconds": 1.5, "lanes": 2.0}


def test_cpu_time_is_counted_by_thread_and_name() -> None:
    done, busy = threading.Event(), threading.Event()

    def spin() -> None:
        Path("/proc/thread-self/comm").write_text("spinner (x) 1", encoding="ascii")
        end = time.thread_time() + 0.06
        while time.thread_time() < end:
            pass
        busy.set()
        done.wait(30)

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        assert busy.wait(30)
        found = {name: seconds for _tid, name, seconds in thread_seconds(os.getpid())}
        assert found["spinner (x) 1"] >= 0.03  # to the clock tick
    finally:
        done.set()
        thread.join()


def test_a_free_port_is_free() -> None:
    assert 1024 <= free_port() <= 65535


def test_shares_of_memory_are_told_apart_by_mapping() -> None:
    maps = [
        ("7f00-7f10 r--s 0 08:01 5 /models/m.colibri", {"Pss": 100, "Rss": 200}),
        ("7f10-7f20 r--s 0 00:01 6 /memfd:colibri:mm.colibri (deleted)", {"Pss": 10}),
        ("7f20-7f30 rw-s 0 00:01 7 /memfd:colibri-arena (deleted)", {"Pss": 20}),
        ("7f30-7f40 rw-p 0 00:00 0 [heap]", {"Pss": 3}),
    ]
    share = share_of(maps, Path("/models/m.colibri"))
    assert (share.total, share.weights, share.arena, share.rest) == (133, 110, 20, 3)
