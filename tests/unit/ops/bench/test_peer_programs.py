"""The peers' programs: how they are found, what they are asked, and what happens when they fail."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from ops.bench.measure import BenchError
from ops.bench.peers.llama_server import ask_streams, completion_request, running, server_options
from ops.bench.peers.merge import merge_into
from ops.bench.peers.noise import Usage, others, usage, wait_quiet
from ops.bench.peers.programs import Peer, find_peer, llama_bench, quantise
from ops.bench.peers.run import PeersWish, cases
from ops.bench.peers.torch_process import TorchProcess, TorchWish
from ops.random_model import SHAPES

SAMPLES = Path(__file__).parent / "samples"
DYING_SERVER = """#!{python}
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        print("out of luck", flush=True)
        os._exit(7)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
"""Healthy until it is asked for something: no build of the engine dies on demand."""


def test_programs_are_found_in_a_build_folder_and_missing_ones_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no llama-bench"):
        find_peer("llama.cpp", tmp_path, repacks=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "llama-bench").touch()
    peer = find_peer("llama.cpp", tmp_path, repacks=False)
    with pytest.raises(BenchError, match=r"llama-server is not there"):
        peer.program("llama-server")
    assert quantise(peer, tmp_path / "m.gguf", "F16", threads=1) == tmp_path / "m.gguf"


def test_only_ik_is_asked_to_repack() -> None:
    theirs, ik = Peer("a", Path()), Peer("ik", Path(), repacks=True)
    assert theirs.prompt(tokens=512) == ["-p", "512", "-n", "0"]
    assert ik.prompt(tokens=512) == ["-fa", "1", "-rtr", "1", "-p", "512", "-n", "0"]
    assert theirs.generation(context=64, answer=8) == ["-p", "0", "-n", "8", "-d", "64"]
    assert ik.generation(context=64, answer=8)[-2:] == ["-gp", "64,8"]


def test_a_server_has_room_for_all_streams_and_takes_their_prompts_at_once() -> None:
    options = server_options(Peer("ik", Path(), repacks=True), Path("m.gguf"), streams=32, tokens=128, threads=2)
    chosen = dict(zip(options[::2], options[1::2], strict=False))
    assert (chosen["-np"], chosen["-c"], chosen["-b"], chosen["-t"]) == ("32", str(32 * 256), str(32 * 128), "2")
    assert options[-3:] == ["-fa", "on", "-rtr"]


def test_requests_are_greedy_full_length_and_cache_nothing() -> None:
    wish = json.loads(completion_request([[5, 6], [7, 8]], 64))
    assert (wish["prompt"], wish["n_predict"], wish["ignore_eos"], wish["cache_prompt"]) == ([[5, 6], [7, 8]], 64, True, False)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_server_that_dies_is_an_error_with_its_log(tmp_path: Path) -> None:
    script(tmp_path / "llama-server", "echo no such model; exit 3")
    with (
        pytest.raises(BenchError, match=r"did not start; it ended with exit code 3.*no such model"),
        running(Peer("a", tmp_path), tmp_path / "m.gguf", streams=1, tokens=8, threads=1),
    ):
        pass


def test_a_server_that_dies_on_the_way_is_an_error_with_its_log(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(DYING_SERVER.format(python=sys.executable))
    program.chmod(0o755)
    with (
        running(Peer("a", tmp_path), tmp_path / "m.gguf", streams=2, tokens=8, threads=1) as server,
        pytest.raises(BenchError, match=r"(?s)gave no answer.*exit code 7.*out of luck"),
    ):
        ask_streams(server, streams=2, prompt=4, answer=4, vocab=range(8), seed=1)


def test_a_program_that_fails_or_runs_other_tests_is_an_error(tmp_path: Path) -> None:
    script(tmp_path / "llama-bench", "echo bad option >&2; exit 1")
    with pytest.raises(BenchError, match="exit code 1: bad option"):
        llama_bench(Peer("a", tmp_path), Path("m.gguf"), threads=1, options=[])
    script(tmp_path / "llama-bench", f"cat {SAMPLES / 'llama-bench.json'}")
    with pytest.raises(BenchError, match="ran 2 tests instead of one"):
        llama_bench(Peer("a", tmp_path), Path("m.gguf"), threads=1, options=[])


def test_cases_are_prompts_then_streams_then_depth() -> None:
    wish = PeersWish(SHAPES["mm"], "s", "int4", (), Path(), prefill=(512,), streams=(1, 8), depth=4096, only=("colibri",))
    assert [case.name for case in cases(wish)] == ["prefill 512", "decode, 1 stream", "decode, 8 streams", "decode behind 4096"]
    assert wish.wants("colibri gRPC")
    assert not wish.wants("llama.cpp Q4_0")


def test_only_what_is_not_ours_counts_as_used_by_others() -> None:
    assert others(Usage(10.0, 100.0, 50.0), Usage(20.0, 112.0, 61.0), cpus=2) == pytest.approx(0.05)
    assert others(Usage(10.0, 100.0, 50.0), Usage(20.0, 110.0, 61.0), cpus=2) == 0.0
    first, second = usage(), usage()
    assert 0 < first.own <= second.own
    assert first.everyone <= second.everyone


def test_waiting_for_quiet_ends_when_it_is_quiet_or_patience_ends() -> None:
    begin = time.monotonic()
    wait_quiet(1.0, cpus=os.cpu_count() or 1, patience=60.0)  # nobody can use more than all
    wait_quiet(-1.0, cpus=1, patience=0.1)  # nobody can use less than nothing
    assert time.monotonic() - begin < 30


def test_a_later_run_takes_the_place_of_the_same_rows_only(tmp_path: Path) -> None:
    def report(*rows: tuple[str, str, float]) -> dict[str, object]:
        found = [{"case": case, "engine": engine, "median": median} for case, engine, median in rows]
        return {"bench": "peers", "limits": {"read_gb_s": 30.0}, "machine": {"cpu": "x"}, "rows": found}

    path = tmp_path / "all.json"
    merge_into(path, report(("decode", "colibri", 1.0), ("decode", "peer", 2.0)), when="first")
    merge_into(path, report(("decode", "colibri", 3.0), ("prefill", "colibri", 4.0)), when="second")
    merged = json.loads(path.read_text())
    rows = [(row["case"], row["engine"], row["median"], row["run"]) for row in merged["rows"]]
    assert rows == [("decode", "colibri", 3.0, 1), ("decode", "peer", 2.0, 0), ("prefill", "colibri", 4.0, 1)]
    assert [run["when"] for run in merged["runs"]] == ["first", "second"]


def test_an_interpreter_that_is_missing_or_lacks_torch_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"nowhere: No such file .* give the interpreter of an environment with torch"):
        TorchProcess(TorchWish(tmp_path / "nowhere", 1))
    python = script(tmp_path / "python", f'exec {sys.executable} -I -S "$@"')  # without site-packages there is no torch
    with pytest.raises(BenchError, match=r"python: ModuleNotFoundError: No module named 'torch'"):
        TorchProcess(TorchWish(python, 1))
    with pytest.raises(BenchError, match=r"exit code 3 instead of an answer"):
        TorchProcess(TorchWish(script(tmp_path / "python", "exit 3"), 1))
