"""`colibri route`, `routing` and the options of damping as people use them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.cli import run

CLI = [sys.executable, "-m", "ops.cli"]
DEADLINE = 30.0
DAMPING = "capacity,capacity_factor=1,margin=100"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def target(tiny_model: Path, runtime: Path) -> Iterator[str]:
    """A server, and where to find it."""
    socket = runtime / "s"
    command = [*CLI, "serve", str(tiny_model), "--unix-socket", str(socket), "--operator-socket", str(runtime / "operators")]
    options = ["--workers-per-node", "0", "--kv-memory", "64MiB", "--name", "served"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("operators: " in line for line in process.stderr), process.wait()
        yield f"unix:{socket}"
    finally:
        process.kill()
        process.communicate()


def done(*arguments: str, text: str = "") -> str:
    environ = os.environ | {"COLUMNS": "160"}
    result = subprocess.run([*CLI, *arguments], input=text, capture_output=True, text=True, check=False, timeout=DEADLINE, env=environ)
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one line of a refused command."""
    code = run(arguments)
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("colibri: "), captured
    return code, captured.err.splitlines()[-1]


def test_a_server_and_a_file_give_the_same_routes(target: str, tiny_model: Path) -> None:
    asked = json.loads(done("route", "Hello there", "--target", target, "--json"))
    here = json.loads(done("route", "--model", str(tiny_model), "--json", text="Hello there"))
    assert asked.pop("model") == "served"
    assert here.pop("model") != "served"
    assert asked == here
    assert len(asked["layers"]) == 3
    assert [len(layer["experts"]) for layer in asked["layers"]] == [len(asked["tokens"])] * 3
    assert "".join(token["text"] for token in asked["tokens"]) == "Hello there"


def test_the_table_has_layers_and_tokens(target: str) -> None:
    lines = done("route", "Hello", "--target", target, "--model", "served", "--layer", "2", "--layer", "1").splitlines()
    assert lines[0] == "served: 5 tokens, 4 experts a layer, 2 a token"
    assert [line.split()[0] for line in lines[2:4]] == ["2", "1"]
    assert [line.split()[0] for line in lines[-5:]] == ["'H'", "'e'", "'l'", "'l'", "'o'"]


def test_tokens_a_chat_and_damping_are_options(target: str) -> None:
    assert [token["id"] for token in json.loads(done("route", "--tokens", "5,6", "-t", target, "--json"))["tokens"]] == [5, 6]
    assert "user" in "".join(token["text"] for token in json.loads(done("route", "Hi", "--chat", "-t", target, "--json"))["tokens"])
    damped = json.loads(done("route", "Hello there, how are you?", "-t", target, "--damping", DAMPING, "--json"))
    assert 0 < damped["rerouted"] < damped["routed"]


def test_a_picture_is_drawn(target: str, tmp_path: Path) -> None:
    assert "picture: " in done("route", "Hello", "-t", target, "--plot", str(tmp_path / "heat.png"))
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")


def test_generate_and_chat_take_damping(target: str) -> None:
    options = ["--target", target, "--max-tokens", "30", "--damping", DAMPING, "--seed", "1"]
    for command in (["generate", "Hello"], ["chat", "Hello"]):
        result = subprocess.run([*CLI, *command, *options], capture_output=True, text=True, check=False, timeout=DEADLINE)
        assert result.returncode == 0, result.stderr
        assert "% rerouted" in result.stderr


def test_the_default_is_shown_and_changed(target: str, runtime: Path) -> None:
    where = ["--operator", f"unix:{runtime / 'operators'}"]
    assert done("routing", *where) == "served: off\n"
    changed = done("routing", "--damping", "heat,growth=5", "--damping-scope", "batch", *where)
    assert changed.startswith("served: heat, scope batch, growth 5, ")
    assert changed.endswith("(before: off)\n")
    policy = json.loads(done("routing", "--json", *where))["policy"]
    assert (policy["damping"], policy["scope"], policy["growth"]) == ("DAMPING_HEAT", "SCOPE_BATCH", 5)
    assert done("routing", "--damping", "off", *where).startswith("served: off (before: heat, ")


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["route", "text", "--tokens", "1"], 2, "--tokens"),
        (["route", "--tokens", "1", "--chat"], 2, "--chat"),
        (["route", "x", "--layer", "-1"], 2, "layer"),
        (["route", "x", "--damping", "warm"], 2, "'warm'"),
        (["route", "x", "--damping", "heat,margin=-1"], 2, "margin"),
        (["route", "x", "--damping", "reuse", "--damping-scope", "sequence"], 2, "--damping-scope"),
        (["route", "x", "--damping-scope", "batch"], 2, "--damping"),
        (["generate", "x", "--damping", "heat,warmth=1"], 2, "'warmth=1'"),
        (["generate", "x", "--damping", "heat,capacity_factor=2"], 2, "capacity_factor is without effect on heat of scope sequence"),
        (["generate", "x", "--damping", "heat,threshold=2", "--damping-scope", "batch"], 2, "which has growth, margin, max_rerouted"),
        (["chat", "x", "--damping", "off,margin=1"], 2, "no numbers"),
        (["routing", "--damping", "heat", "--damping-scope", "world"], 2, "'world'"),
        (["serve", "tiny", "--quant", "int4"], 2, "--quant int4"),
        (["serve", "tiny", "--operator-socket", "nowhere/s"], 1, "nowhere is not a directory"),
        (["serve", "tiny", "--damping", "warm"], 1, "'warm'"),
        (["serve", "tiny", "--damping", "reuse,decay=1"], 1, "decay is without effect"),
        (["serve", "tiny", "--damping", "heat,decay=2"], 1, "decay"),
        (["serve", "tiny", "--damping", "reuse", "--damping-scope", "sequence"], 1, "damping_scope"),
        (["route", "x", "--model", "absent"], 1, "absent"),
        (["route", "x", "--plot", "nowhere/heat.png"], 1, "nowhere"),
        (["route", "x", "--target", "localhost:1"], 1, "UNAVAILABLE"),
    ],
)
def test_bad_usage_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found, line = refused(capsys, *arguments)
    assert found == code
    assert named in line
    assert list(tmp_path.iterdir()) == []


def test_what_the_model_refuses_is_one_line(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    for arguments, named in ((["x", "--layer", "9"], "layers[0]"), (["--tokens", "512"], "tokens.ids[0]"), ([""], "text")):
        code, line = refused(capsys, "route", *arguments, "--model", str(tiny_model))
        assert code == 1
        assert named in line
