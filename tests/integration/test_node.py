"""`colibri node` as a process: what it says it is, what it computes, what it refuses, and how it leaves."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2

from colibri.v1 import experts_pb2 as pb, experts_pb2_grpc, node_pb2, node_pb2_grpc
from engine_c import Model, Session, SessionOptions
from engine_c.remote import ExpertBatch
from ops.bench.shapes import parse_shape
from ops.cli import run
from ops.random_model import SHAPES, make_model
from service.config import ConfigError
from service.node.config import NodeConfig
from service.wire import PROTOCOL
from tests.integration.serving import PATIENCE, ROOT, reason, until

INVALID = 3  # google.rpc.Code
LAYER, EXPERTS, COUNTS, ROWS = 1, (0, 2, 3), (2, 1, 3), 4
PAIRS = np.array([0, 2, 1, 0, 1, 3], np.int32)


@dataclass
class Node:
    process: subprocess.Popen[str]
    channel: grpc.Channel
    address: str

    def describe(self) -> node_pb2.NodeDescription:
        return node_pb2_grpc.NodeStub(self.channel).Describe(node_pb2.DescribeRequest(), timeout=PATIENCE)

    def execute(self, *requests: pb.ExecuteRequest) -> list[pb.ExecuteResponse]:
        return list(experts_pb2_grpc.ExpertsStub(self.channel).Execute(iter(requests), timeout=PATIENCE))

    def health(self, service: str) -> int:
        check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        return int(check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE).status)


@contextlib.contextmanager
def node_of(model: Path, *options: str, log: Path) -> Iterator[Node]:
    """A node on a free port; killed if it is still there at the end."""
    command = [sys.executable, "-m", "ops.cli", "node", str(model), "--port", "0", "--name", "n", "--threads-per-worker", "1", *options]
    with log.open("w") as stderr, subprocess.Popen(command, cwd=ROOT, stderr=stderr, text=True) as process:
        try:
            found = until(lambda: re.search(r"serves .* on 127\.0\.0\.1:(\d+)", log.read_text()) or process.poll(), "the node serves")
            assert isinstance(found, re.Match), log.read_text()
            address = f"127.0.0.1:{found[1]}"
            with grpc.insecure_channel(address) as channel:
                yield Node(process, channel, address)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def node(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node_of(tiny_model, "--share", "1/2", log=tmp_path_factory.mktemp("node") / "log") as running:
        yield running


def opening(**fields: object) -> pb.ExecuteRequest:
    return pb.ExecuteRequest(open=pb.OpenStream(front_end="test", **fields))  # type: ignore[arg-type]


def rows_of(hidden: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(7).standard_normal((ROWS, hidden), np.float32)


def batch(hidden: int, **changes: object) -> pb.ExecuteRequest:
    fields = {
        "id": 5,
        "layer": LAYER,
        "experts": EXPERTS,
        "counts": COUNTS,
        "dtype": pb.DATA_TYPE_F32,
        "rows": ROWS,
        "data": rows_of(hidden).tobytes(),
        "row_of_pair": PAIRS.tobytes(),
    }
    return pb.ExecuteRequest(batch=pb.ExpertBatch(**(fields | changes)))  # type: ignore[arg-type]


def computed_here(path: Path) -> tuple[bytes, int]:
    """The same batch on a session of this process."""
    with Model.open(path) as model, Session(model, SessionOptions(max_seqs=1, max_logit_rows=1, kv_blocks=1, split_down=1)) as session:
        hidden = model.info.hidden
        work = ExpertBatch(LAYER, EXPERTS, COUNTS, rows_of(hidden).tobytes(), ROWS, PAIRS.tobytes(), b"")
        return bytes(session.run_experts(work, kind="f32")), hidden


def test_it_says_what_it_is_and_holds(node: Node) -> None:
    said = node.describe()
    assert (said.name, said.protocol, said.state, said.assignable) == ("n", PROTOCOL, node_pb2.NODE_STATE_READY, False)
    assert len(said.model_digest) == 64
    assert said.instance
    assert said.share_bytes > 0
    assert [list(share.experts) for share in said.shares] == [list(range(said.experts // 2))] * said.layers
    assert node.health("") == node.health("colibri.v1.Experts") == health_pb2.HealthCheckResponse.SERVING


def test_outputs_are_those_of_a_session_here_bit_by_bit(node: Node, tiny_model: Path) -> None:
    expected, hidden = computed_here(tiny_model)
    weights = np.array([0.5, 0.25, 1, 0.125, 3, 0.3], np.float32)
    opened, plain, summed = node.execute(opening(), batch(hidden), batch(hidden, id=6, weights=weights.tobytes()))
    assert opened.opened.name == "n"
    assert (plain.result.id, plain.result.data) == (5, expected)
    total = np.zeros((ROWS, hidden), np.float32)
    for pair, output in enumerate(np.frombuffer(expected, np.float32).reshape(-1, hidden)):
        total[PAIRS[pair]] += weights[pair] * output
    assert (summed.result.id, summed.result.data) == (6, total.tobytes())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer": 99}, "layer"),
        ({"experts": (0, 2, 9999)}, "experts"),
        ({"experts": (2, 0, 3)}, "experts"),
        ({"experts": ()}, "experts"),
        ({"counts": (2, 1)}, "counts"),
        ({"counts": (2, 0, 4)}, "counts"),
        ({"dtype": pb.DATA_TYPE_I32}, "dtype"),
        ({"dtype": pb.DATA_TYPE_PREPARED}, "dtype"),
        ({"data": b"short"}, "data"),
        ({"rows": 0}, "rows"),
        ({"row_of_pair": b"1234"}, "row_of_pair"),
        ({"row_of_pair": (PAIRS + 1).tobytes()}, "row_of_pair"),
        ({"row_of_pair": PAIRS[::-1].tobytes()}, "row_of_pair"),
        ({"weights": b"1234"}, "weights"),
        ({"input_weights": b"1234"}, "input_weights"),
    ],
)
def test_a_malformed_batch_is_refused_by_its_field(node: Node, changes: dict[str, object], field: str) -> None:
    hidden = node.describe().hidden
    _, failed, again = node.execute(opening(), batch(hidden, **changes), batch(hidden, id=6, layer=77))
    assert (failed.failed.id, failed.failed.code) == (5, INVALID)
    assert failed.failed.message.startswith(f"{field}: ")
    assert again.failed.id == 6, "the stream went on"


@pytest.mark.parametrize(
    ("requests", "code", "word"),
    [
        ([opening(model_digest="0" * 64)], grpc.StatusCode.FAILED_PRECONDITION, "digest"),
        ([opening(protocol=99)], grpc.StatusCode.FAILED_PRECONDITION, "protocol"),
        ([opening(model="other")], grpc.StatusCode.NOT_FOUND, "'other'"),
        ([batch(8)], grpc.StatusCode.INVALID_ARGUMENT, "first message"),
        ([], grpc.StatusCode.INVALID_ARGUMENT, "first message"),
        ([opening(), opening()], grpc.StatusCode.INVALID_ARGUMENT, "only batches"),
    ],
)
def test_a_stream_that_does_not_fit_is_refused(node: Node, requests: Sequence[pb.ExecuteRequest], code: grpc.StatusCode, word: str) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        node.execute(*requests)
    assert refusal.value.code() == code
    assert word in str(refusal.value.details())


def test_a_share_given_by_flag_is_not_assigned(node: Node) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        node_pb2_grpc.NodeStub(node.channel).Assign(node_pb2.AssignRequest(), timeout=PATIENCE)
    assert refusal.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "share 1/2" in str(refusal.value.details())


def test_a_batch_longer_than_the_session_is_computed_in_parts(tiny_model: Path, node: Node) -> None:
    hidden, long = node.describe().hidden, 1300
    rows = np.random.default_rng(8).standard_normal((long, hidden), np.float32)
    numbers = np.concatenate([np.arange(long), np.arange(0, long, 2)]).astype(np.int32)
    asked = batch(hidden, experts=(1, 3), counts=(long, long // 2), rows=long, data=rows.tobytes(), row_of_pair=numbers.tobytes())
    _, answer = node.execute(opening(), asked)
    options = SessionOptions(max_rows=2048, max_seqs=1, max_logit_rows=1, kv_blocks=1, split_down=1)
    with Model.open(tiny_model) as model, Session(model, options) as session:
        whole = ExpertBatch(LAYER, (1, 3), (long, long // 2), rows.tobytes(), long, numbers.tobytes(), b"")
        assert answer.result.data == bytes(session.run_experts(whole, kind="f32"))


def test_a_row_with_a_nan_spoils_only_itself(node: Node, tiny_model: Path) -> None:
    expected, hidden = computed_here(tiny_model)
    rows = rows_of(hidden)
    rows[1, 3] = np.nan
    _, answer = node.execute(opening(), batch(hidden, data=rows.tobytes()))
    spoilt = np.frombuffer(answer.result.data, np.float32).reshape(-1, hidden)
    whole = np.frombuffer(expected, np.float32).reshape(-1, hidden)
    assert np.isnan(spoilt[PAIRS == 1]).all()
    assert np.array_equal(spoilt[PAIRS != 1], whole[PAIRS != 1])


def test_the_log_has_the_first_failure_of_a_stream(tiny_model: Path, tmp_path: Path) -> None:
    with node_of(tiny_model, "--share", "1/2", log=tmp_path / "log") as node:
        node.execute(opening(), *[batch(8, layer=99)] * 3)
        lines = [line for line in (tmp_path / "log").read_text().splitlines() if "failed" in line]
        assert len(lines) == 1
        assert re.search(r"a batch of test \(no version\) at 127\.0\.0\.1:\d+ failed: layer: there is no layer 99", lines[0])


def test_an_assignable_node_holds_what_it_is_told(tiny_model: Path, tmp_path: Path) -> None:
    with node_of(tiny_model, "--share", "auto", log=tmp_path / "log") as node:
        said = node.describe()
        assert (said.assignable, list(said.shares), said.share_bytes) == (True, [], 0)
        stub = node_pb2_grpc.NodeStub(node.channel)
        request = node_pb2.AssignRequest(shares=[node_pb2.ExpertShare(layer=1, experts=[1, 3])])
        said = stub.Assign(request, timeout=PATIENCE)
        assert list(said.shares) == list(request.shares)
        assert said.share_bytes > 0
        for wrong in ([0, 9999], [3, 1]):
            with pytest.raises(grpc.RpcError) as refusal:
                stub.Assign(node_pb2.AssignRequest(shares=[node_pb2.ExpertShare(layer=0, experts=wrong)]), timeout=PATIENCE)
            assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert node.describe().shares == request.shares


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 150 MB, nearly all of it 12 experts a layer: what is measured is then not what a process varies by itself."""
    path = tmp_path_factory.mktemp("large") / "large.colibri"
    make_model(path, parse_shape("2,1024,16,4,2048,12,2,512"), quant="int8", seed=1)
    return path


def memory(node: Node) -> int:
    """Bytes of the process and its workers; what several map is counted once."""
    processes = [psutil.Process(node.process.pid), *psutil.Process(node.process.pid).children()]
    return sum(process.memory_full_info().pss for process in processes)


def use(node: Node, shares: Sequence[node_pb2.ExpertShare], hidden: int) -> list[bytes]:
    """Outputs of all these experts for the same row: every page of theirs is read."""
    row = rows_of(hidden)[:1].tobytes()
    asked = [
        batch(
            hidden,
            layer=share.layer,
            experts=share.experts,
            counts=[1] * len(share.experts),
            rows=1,
            data=row,
            row_of_pair=bytes(4 * len(share.experts)),
        )
        for share in shares
    ]
    return [answer.result.data for answer in node.execute(opening(), *asked)[1:]]


@pytest.mark.parametrize("load", ["map", "memfd"])
def test_memory_is_the_share_and_a_tenth_beside_the_processes_own(large_model: Path, tmp_path: Path, load: str) -> None:
    with node_of(large_model, "--share", "2/3", "--load", load, "--workers-per-node", "1", log=tmp_path / "log") as node:
        said, own = node.describe(), memory(node)
        assert said.share_bytes > 45 << 20
        assert own < 2 * 80 << 20, "nothing of the model is mapped in yet"
        assert all(use(node, said.shares, said.hidden))
        grown = memory(node) - own
        assert 0.9 * said.share_bytes < grown < 1.1 * said.share_bytes


def copied(node: Node) -> int:
    """Bytes that the node's memory files of the model take, whether anybody maps them or not."""
    folder = Path(f"/proc/{node.process.pid}/fd")
    found = {path.stat().st_ino: path.stat().st_blocks * 512 for path in folder.iterdir() if ".colibri (deleted)" in os.readlink(path)}
    return sum(found.values())


@pytest.mark.parametrize("load", ["map", "memfd"])
def test_what_is_no_longer_assigned_is_given_up(large_model: Path, tmp_path: Path, load: str) -> None:
    with node_of(large_model, "--share", "auto", "--load", load, "--workers-per-node", "2", log=tmp_path / "log") as node:
        own, stub, answers = memory(node), node_pb2_grpc.NodeStub(node.channel), []
        for first in (0, 4, 8, 2, 0):
            wanted = [node_pb2.ExpertShare(layer=layer, experts=range(first, first + 4)) for layer in (0, 1)]
            said = stub.Assign(node_pb2.AssignRequest(shares=wanted), timeout=PATIENCE)
            answers.append(use(node, wanted, said.hidden))
            assert 0.9 * said.share_bytes < memory(node) - own < 1.1 * said.share_bytes
            assert copied(node) == 0 if load == "map" else said.share_bytes <= copied(node) < 1.1 * said.share_bytes
        assert answers[-1] == answers[0] != answers[1]
        stub.Assign(node_pb2.AssignRequest(), timeout=PATIENCE)
        assert copied(node) == 0
        assert memory(node) - own < 0.1 * said.share_bytes
        assert use(node, wanted, said.hidden) == answers[0], "what is not held is read from the file"


@pytest.mark.parametrize("load", ["map", "memfd"])
def test_shares_that_change_under_load_change_no_answer(tiny_model: Path, tmp_path: Path, load: str) -> None:
    expected, hidden = computed_here(tiny_model)
    with node_of(tiny_model, "--share", "auto", "--load", load, "--workers-per-node", "2", log=tmp_path / "log") as node:
        stub, over = node_pb2_grpc.NodeStub(node.channel), threading.Event()

        def asked() -> Iterator[pb.ExecuteRequest]:
            yield opening()
            while not over.is_set():
                yield batch(hidden)

        with ThreadPoolExecutor(2) as threads:
            streams = [threads.submit(lambda: list(experts_pb2_grpc.ExpertsStub(node.channel).Execute(asked()))) for _ in range(2)]
            try:
                for turn in range(40):
                    some = [node_pb2.ExpertShare(layer=LAYER, experts=experts) for experts in ((0, 2), (1, 2, 3), (), (3,))[turn % 4 :][:1]]
                    stub.Assign(node_pb2.AssignRequest(shares=some), timeout=PATIENCE)
            finally:
                over.set()
            answers = [answer.result.data for stream in streams for answer in stream.result()[1:]]
        assert len(answers) > 40
        assert set(answers) == {expected}


def test_who_asks_for_news_waits_for_it(tiny_model: Path, tmp_path: Path) -> None:
    with node_of(tiny_model, "--share", "auto", log=tmp_path / "log") as node:
        stub, known = node_pb2_grpc.NodeStub(node.channel), node.describe().revision
        began = time.monotonic()
        same = stub.Describe(node_pb2.DescribeRequest(revision=known, wait_ms=300), timeout=PATIENCE)
        assert (same.revision, time.monotonic() - began >= 0.3) == (known, True)
        news = stub.Describe.future(node_pb2.DescribeRequest(revision=known, wait_ms=10_000), timeout=9)
        stub.Assign(node_pb2.AssignRequest(shares=[node_pb2.ExpertShare(layer=1, experts=[1])]), timeout=PATIENCE)
        assert [share.layer for share in news.result().shares] == [1]


def test_a_worker_that_is_killed_changes_no_answer(tiny_model: Path, tmp_path: Path) -> None:
    expected, hidden = computed_here(tiny_model)
    with node_of(tiny_model, "--share", "auto", "--workers-per-node", "1", log=tmp_path / "log") as node:
        workers = psutil.Process(node.process.pid).children()
        assert workers
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        _, *answers = node.execute(opening(), *[batch(hidden)] * 20)
        assert [answer.result.data for answer in answers] == [expected] * 20


def test_on_sigterm_it_says_so_and_leaves_when_its_front_ends_have(tiny_model: Path, tmp_path: Path) -> None:
    with node_of(tiny_model, "--experts", "0-1", log=tmp_path / "log") as node:
        asked = iter([opening()])
        answers = experts_pb2_grpc.ExpertsStub(node.channel).Execute(_held_open(asked, node), timeout=PATIENCE)
        assert next(answers).opened.state == node_pb2.NODE_STATE_READY
        stub, known = node_pb2_grpc.NodeStub(node.channel), node.describe().revision
        news = stub.Describe.future(node_pb2.DescribeRequest(revision=known, wait_ms=10_000), timeout=9)
        node.process.send_signal(signal.SIGTERM)
        said = news.result()
        assert (said.state, said.revision > known) == (node_pb2.NODE_STATE_DRAINING, True), "told at once, not when the wait was over"
        assert node.describe().state == node_pb2.NODE_STATE_DRAINING
        assert node.health("colibri.v1.Experts") == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as refusal:
            node.execute(opening())
        assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
        answers.cancel()
        assert node.process.wait(PATIENCE) == 0


def _held_open(requests: Iterator[pb.ExecuteRequest], node: Node) -> Iterator[pb.ExecuteRequest]:
    yield from requests
    node.process.wait()


def test_streams_that_are_not_opened_keep_nobody_out_and_end(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_MAX_STREAMS", "2")
    with node_of(tiny_model, "--experts", "0-1", log=tmp_path / "log") as node:
        stub = experts_pb2_grpc.ExpertsStub(node.channel)
        silent = [stub.Execute(_held_open(iter(()), node), timeout=PATIENCE) for _ in range(4)]
        streams = [stub.Execute(_held_open(iter([opening()]), node), timeout=PATIENCE) for _ in range(2)]
        assert all(next(stream).HasField("opened") for stream in streams)
        with pytest.raises(grpc.RpcError) as refusal:
            node.execute(opening())
        assert (refusal.value.code(), reason(refusal.value)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")
        for stream in silent:
            with pytest.raises(grpc.RpcError) as ended:
                next(stream)
            assert (ended.value.code(), reason(ended.value)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "NOT_OPENED")
        for stream in streams:
            stream.cancel()
        until(lambda: _takes_a_stream(node), "a stream is taken again")


def test_an_open_stream_that_asks_for_nothing_gives_its_place_back(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLIBRI_MAX_STREAMS", "2")
    with node_of(tiny_model, "--experts", "0-3", "--idle-timeout", "0.4", log=tmp_path / "log") as node:
        with grpc.insecure_channel(node.address, [("grpc.use_local_subchannel_pool", 1)]) as other:
            silent = experts_pb2_grpc.ExpertsStub(other).Execute(_held_open(iter([opening()]), node), timeout=PATIENCE)
            assert next(silent).HasField("opened")
            asked: queue.SimpleQueue[pb.ExecuteRequest | None] = queue.SimpleQueue()
            asked.put(opening())
            alive = experts_pb2_grpc.ExpertsStub(node.channel).Execute(iter(asked.get, None), timeout=PATIENCE)
            assert next(alive).HasField("opened")
            until(lambda: (node.describe(), silent.done())[1], "the silent one is ended")
            assert (silent.code(), reason(silent)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "STREAM_IDLE")
            assert silent.details() == "nothing has been asked for over this stream for 0.4 s: open another when there is something to ask"
            asked.put(batch(node.describe().hidden))
            assert next(alive).result.id == 5, "its caller had asked what the node is all the time"
            until(lambda: _takes_a_stream(node), "the place is free")
            asked.put(None)
            assert list(alive) == [], "and it ends as it likes"
        assert "its caller has said nothing for 0.4 s" in (tmp_path / "log").read_text()
        assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("assigned", [False, True])
def test_a_model_that_is_cut_short_ends_a_node_that_reads_it_with_a_sentence(tmp_path: Path, assigned: bool) -> None:
    model, log = tmp_path / "m.colibri", tmp_path / "log"
    make_model(model, SHAPES["tiny"], quant="int8", seed=1)
    said = f"{model}: it was cut from {model.stat().st_size} to 4096 bytes while the node read it: replace a model by renaming"
    with node_of(model, "--share", "auto" if assigned else "1/1", "--load", "map", log=log) as node:
        hidden = node.describe().hidden
        if assigned:
            shares = [node_pb2.ExpertShare(layer=LAYER, experts=EXPERTS)]
            node_pb2_grpc.NodeStub(node.channel).Assign(node_pb2.AssignRequest(shares=shares), timeout=PATIENCE)
        assert node.execute(opening(), batch(hidden))[1].HasField("result")
        os.truncate(model, 4096)
        with contextlib.suppress(grpc.RpcError):  # it may have seen it by itself a moment ago
            failed = node.execute(opening(), batch(hidden))[1].failed
            assert (failed.code, failed.message.startswith(said)) == (14, True)
        assert node.process.wait(PATIENCE) == 1
        assert f"\ncolibri: {said}" in log.read_text()


def test_a_node_with_copies_outlives_its_file(tmp_path: Path) -> None:
    model = tmp_path / "m.colibri"
    make_model(model, SHAPES["tiny"], quant="int8", seed=1)
    with node_of(model, "--experts", "0,2-3", "--load", "memfd", log=tmp_path / "log") as node:
        hidden = node.describe().hidden
        expected = node.execute(opening(), batch(hidden))[1].result.data
        os.truncate(model, 0)
        assert node.execute(opening(), batch(hidden))[1].result.data == expected
        lacking = node.execute(opening(), batch(hidden, experts=(0, 1, 2)))[1].failed
        assert "it was cut from" in lacking.message, "an expert that is not held would be read from the file"
        assert node.execute(opening(), batch(hidden))[1].result.data == expected


def _takes_a_stream(node: Node) -> bool:
    with contextlib.suppress(grpc.RpcError):
        return bool(node.execute(opening()))
    return False


def test_what_a_caller_calls_itself_stays_on_its_line(tiny_model: Path, tmp_path: Path) -> None:
    with node_of(tiny_model, "--experts", "0-1", log=tmp_path / "log") as node:
        named = {"front_end": "a\nERROR \x1b[31m" + 100 * "b", "version": "\u202e1"}
        node.execute(pb.ExecuteRequest(open=pb.OpenStream(**named)))
        with pytest.raises(grpc.RpcError):
            node.execute(pb.ExecuteRequest(open=pb.OpenStream(model_digest="\n\x1b", **named)))
        until(lambda: "refused" in (tmp_path / "log").read_text(), "it says so")
        lines = [line for line in (tmp_path / "log").read_text().splitlines() if "bbb" in line]
        assert len(lines) == 2
        assert all(r"a\nERROR \x1b[31m" in line and 50 < line.count("b") < 70 and r"(\u202e1)" in line for line in lines)
        assert r"digest \n\x1b," in lines[1]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--share", "3/2"], "share '3/2'"),
        (["--experts", "4-1"], "4-1 is the wrong way round, 1-4 is meant"),
        (["--share", "2/200"], "experts a layer; cut them into"),
        (["--port", "99999", "--share", "1/2"], "port is 99999: it must lie between 0 and 65535"),
        (["--metrics-port", "65536", "--share", "1/2"], "metrics_port is 65536"),
        (
            ["--metrics-port", "1", "--metrics-host", "192.0.2.1", "--share", "1/2"],
            "metrics cannot be served on 192.0.2.1:1: Cannot assign",
        ),
        (["--experts", "0-9999"], "there is no expert 9999"),
        ([], "either experts"),
        (["--share", "auto", "--host", "0.0.0.0"], "--tls-cert"),
        (["--share", "auto", "--load", "map", "--placement", "rows"], "placement rows needs"),
        (["--share", "auto", "--tls-cert", "x"], "--tls-key, --tls-ca missing"),
        (
            ["--share", "auto", "--tls-cert", "x", "--tls-key", "x", "--tls-ca", "x"],
            "--tls-cert x: No such file or directory; `make certs`",
        ),
    ],
)
def test_wrong_options_are_one_line(tiny_model: Path, options: list[str], word: str) -> None:
    command = [sys.executable, "-m", "ops.cli", "node", str(tiny_model), "--port", "0", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode != 0
    assert word in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_rows", "99999999999"),
        ("max_streams", "0"),
        ("max_streams", "1000000"),
        ("drain_grace", "nan"),
        ("drain_grace", "-1"),
        ("hang_ms", "1t"),
    ],
)
def test_settings_out_of_range_are_named(tiny_model: Path, setting: str, value: str) -> None:
    environ = {f"COLIBRI_{setting.upper()}": value}
    with pytest.raises(ConfigError, match=f"^{setting} is .*: it must lie between "):
        NodeConfig.from_env(environ, model=tiny_model, experts="0-1")


@pytest.mark.parametrize("name", ["n\x1b[2J", "n" * 254])
def test_a_name_that_can_t_be_shown_is_refused(tiny_model: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^name 'n.* must be printable and have 253 characters at the most$"):
        NodeConfig(model=tiny_model, experts="0-1", name=name)


def test_an_address_in_use_is_said_before_the_model_is_opened(node: Node, tmp_path: Path) -> None:
    (tmp_path / "m.colibri").write_text("no model")
    command = [sys.executable, "-m", "ops.cli", "node", str(tmp_path / "m.colibri"), "--share", "1/2", "--port", node.address.split(":")[1]]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.stderr == f"colibri: cannot listen on {node.address}: Address already in use; choose another port or host\n"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("health",), "no service colibri.v1.Inference; ask a node with --service colibri.v1.Experts"),
        (("generate", "text", "--target"), "if it is a node, ask a front end"),
    ],
)
def test_whoever_takes_a_node_for_a_front_end_is_told(
    node: Node, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], says: str
) -> None:
    assert run([*command, node.address]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "held"),
    [
        (("--share", "1/2"), r"holds \d+ of \d+ experts in each of \d+ layers"),
        (("--share", "auto"), "holds no experts until a front end assigns some"),
        (("--layers", "1-2"), r"holds layers 1-2 of \d+ whole"),
    ],
)
def test_it_logs_what_it_holds(tiny_model: Path, tmp_path: Path, options: tuple[str, ...], held: str) -> None:
    with node_of(tiny_model, *options, log=tmp_path / "log"):
        until(lambda: re.search(held, (tmp_path / "log").read_text()), "it says what it holds")
