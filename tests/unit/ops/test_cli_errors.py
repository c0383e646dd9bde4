"""Bad input to `colibri`: one line on stderr that names the thing, exit code 2 for wrong usage and 1 for failure, never a traceback."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import grpc
import pytest
from typer.main import get_command

from ops.cli import MODULES, make_app, run
from ops.models import resolve


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int, str]:
    """Exit code and the one line of a refused command."""
    code = run(arguments)
    captured = capsys.readouterr()
    assert captured.err.startswith("colibri: "), captured
    assert captured.err.count("\n") == 1, captured.err
    return code, captured.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["convrt"], "convrt"),
        (["convert", "x"], "OUT"),
        (["convert", "a", "b", "--quant", "int5"], "int5"),
        (["convert", "a", "b", "--head", "int3"], "--head': 'int3' is not one of 'f32', 'bf16', 'int8', 'int4'"),
        (["bench", "make-model", "--head", "q6", "o.colibri"], "--head': 'q6'"),
        (["logits", "m.colibri", "--tokens", "1,x", "--out", "o.npz"], "'x'"),
        (["logits", "m.colibri", "--tokens", ",", "--out", "o.npz"], "--tokens"),
        (["logits", "m.colibri", "--tokens", "1", "--out", "o.npz", "--workers", "-1"], "workers"),
        (["bench", "make-model", "--shape", "1,2,3", "o.colibri"], "--shape"),
        (["bench", "make-model", "--shape", "1,64,4,3,64,2,1,100", "o.colibri"], "kv_heads"),
        (["bench", "make-model", "--shape", "1,64,4,4,64,2,3,100", "o.colibri"], "top_k"),
        (["bench", "batch", "m.colibri", "--streams", "one"], "--streams"),
        (["generate", "text", "--tokens", "1"], "--tokens"),
        (["generate", "text", "--max-tokens", "0"], "max-tokens"),
        (["generate", "--tokens", "-5"], "-5"),
        (["serve", "tiny", "--kv-memory", "lots"], "lots"),
        (["serve", "tiny", "--load", "disk"], "disk"),
    ],
)
def test_wrong_usage_is_code_2_and_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, line = refused(capsys, arguments)
    assert code == 2
    assert named in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["convert", "absent", "out.colibri"], "absent"),
        (["convert", ".", "nowhere/out.colibri"], "nowhere"),
        (["convert", ".", "/dev/null", "--force"], "no regular file"),
        (["inspect", "absent.colibri"], "absent.colibri"),
        (["verify", "."], "directory"),
        (["logits", "absent.colibri", "--tokens", "1", "--out", "o.npz"], "absent.colibri"),
        (["bench", "decode", "absent.colibri"], "absent.colibri"),
        (["serve", "absent.colibri"], "absent.colibri"),
        (["serve", "."], "colibri convert"),
        (["serve", "tiny", "--port", "99999"], "port"),
        (["serve", "tiny", "--nodes", "node:1"], "set --nodes-cert, --nodes-key and --nodes-ca, or --nodes-insecure where"),
        (["serve", "tiny", "--nodes-balance", "auto"], "--nodes-balance: only for nodes"),
        (["health", "localhost:1"], "start one with `colibri serve` or `colibri node`"),
        (["generate", "text", "--target", "localhost:1"], "UNAVAILABLE"),
        (["chat", "text", "--target", "unix:/absent/socket"], "is the server running?"),
        (["logits", "absent.colibri", "--tokens", "@absent.txt", "--out", "o.npz"], "absent.txt"),
    ],
)
def test_failure_is_code_1_and_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, line = refused(capsys, arguments)
    assert code == 1
    assert named in line
    assert list(tmp_path.iterdir()) == []


class Losing(grpc.GenericRpcHandler):
    """A server that could not connect to something itself, and says so as ours do: with details in the trailers."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
            context.set_trailing_metadata((("grpc-status-details-bin", b""),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "nodes are lost: failed to connect to a:1")

        return grpc.unary_unary_rpc_method_handler(refuse)


def test_a_server_that_answers_is_not_said_to_be_absent(capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Losing()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        line = refused(capsys, ["health", f"127.0.0.1:{port}"])[1]
    finally:
        server.stop(0).wait()
    assert line == "colibri: UNAVAILABLE: nodes are lost: failed to connect to a:1\n"


def test_paths_in_errors_stay_as_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    absent = tmp_path / "nodes_cert.pem"
    files = ["--nodes-cert", str(absent), "--nodes-key", str(absent), "--nodes-ca", str(absent)]
    line = refused(capsys, ["serve", "tiny", "--port", "0", "--nodes", "localhost:1", *files])[1]
    assert line.startswith(f"colibri: --nodes-cert {absent}: No such file or directory")


def test_no_container_is_refused_by_every_reader(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "text.colibri"
    path.write_text("this is no container")
    for command in ("inspect", "verify", "serve"):
        assert refused(capsys, [command, str(path)])[0] == 1
    code, line = refused(capsys, ["logits", str(path), "--tokens", "1", "--out", str(tmp_path / "o.npz")])
    assert code == 1
    assert "text.colibri" in line
    assert [item.name for item in tmp_path.iterdir()] == ["text.colibri"]


def test_existing_output_is_kept_without_force(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "precious.colibri"
    out.write_text("precious")
    code, line = refused(capsys, ["bench", "make-model", "--shape", "tiny", str(out)])
    assert code == 1
    assert "--force" in line
    assert out.read_text() == "precious"


def test_a_link_and_a_device_are_not_replaced_by_the_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = resolve("random", cache=tmp_path).path
    link, pipe = tmp_path / "link.npz", tmp_path / "pipe.npz"
    link.symlink_to(model)
    os.mkfifo(pipe)  # in place of a device: a failure of this test must not cost the machine its /dev/null
    for out in (link, pipe):
        code, line = refused(capsys, ["logits", str(model), "--tokens", "1", "--out", str(out)])
        assert code == 1
        assert str(out) in line
    assert link.is_symlink()
    assert pipe.is_fifo()


def test_wrong_usage_points_to_the_commands_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "`colibri convert --help`" in refused(capsys, ["convert", "x"])[1]
    assert "`colibri bench --help`" in refused(capsys, ["bench"])[1]


def test_no_command_shows_the_help_and_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "\n  serve " in captured.err


def test_version_option_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"colibri {metadata.version('colibri')}\n"


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    script = (
        "import sys; from ops.cli import run; run(['--help']);"
        "heavy = {'numpy', 'grpc', 'engine_c', 'tokenizers', 'psutil'};"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for command in ("serve", "generate", "chat", "convert", "inspect", "verify", "logits", "bench", "health", "version"):
        assert f"  {command} " in done.stdout
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("module", MODULES)
def test_a_command_asked_for_is_registered_alone(module: str) -> None:
    for command in MODULES[module]:
        assert set(get_command(make_app(command)).commands) == set(MODULES[module])


def test_an_unknown_command_meets_all_others() -> None:
    everything = {command for commands in MODULES.values() for command in commands}
    assert set(get_command(make_app("sevre")).commands) == set(get_command(make_app()).commands) == everything


def test_closed_pipe_ends_quietly() -> None:
    colibri = f"{shlex.quote(sys.executable)} -m ops.cli"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {colibri} --help | true"], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode in (0, 1)  # 0: all was written before the reader went


def test_interrupt_is_code_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ops.convert.convert", interrupted)
    assert run(["convert", str(tmp_path), str(tmp_path / "out.colibri")]) == 130


def test_write_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """A file size limit of 64 KiB stands for a full disk: the write itself fails, whatever was checked before."""
    arguments = [sys.executable, "-m", "ops.cli", "bench", "make-model", "--shape", "tiny", "--quant", "f32", str(tmp_path / "big.colibri")]
    done = subprocess.run(["bash", "-c", f"ulimit -f 64; exec {shlex.join(arguments)}"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    assert done.stderr.count("\n") == 1
    assert "big.colibri" in done.stderr
    assert list(tmp_path.iterdir()) == []
