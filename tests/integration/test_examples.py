"""The example clients against a server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.serving import PATIENCE, ROOT, serving


@pytest.mark.parametrize("program", ["forward.py", "execute.py"])
def test_a_python_client_goes_through_all_layers(tiny_model: Path, program: str) -> None:
    with serving(tiny_model, experts_api=True) as server:
        command = [sys.executable, "-W", "error", f"ops/examples/{program}", server.target]
        done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE)
        layers = server.server.default.model.artifact.routed_layers
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("layer")] == [f"layer {layer}" for layer in layers]
    assert "nan" not in done.stdout


@pytest.mark.parametrize("program", ["forward.py", "execute.py"])
def test_a_python_client_says_in_one_line_why_it_fails(tiny_model: Path, program: str) -> None:
    command = [sys.executable, f"ops/examples/{program}"]
    with serving(tiny_model) as server:  # without experts_api
        done = subprocess.run(
            [*command, server.target], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE
        )
    assert done.returncode == 1
    assert done.stderr.startswith(f"{program}: INVALID_ARGUMENT: ")
    assert done.stderr.count("\n") == 1
    told = subprocess.run([*command, "--help"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE)
    assert (told.returncode, "HOST:PORT" in told.stdout) == (0, True)


def lacking() -> str:
    """What the C++ client can't be built without, and is not here."""
    programs = [name for name in ("make", "g++", "protoc", "grpc_cpp_plugin", "pkg-config") if shutil.which(name) is None]
    if not programs and subprocess.run(["pkg-config", "--exists", "grpc++", "protobuf"], check=False).returncode:
        programs = ["grpc++"]
    return ", ".join(programs)


@pytest.mark.skipif(
    bool(lacking()),
    reason=f"NOT TESTED: the C++ client, for want of {lacking()}. Debian: apt-get install g++ make libgrpc++-dev protobuf-compiler-grpc",
)
def test_the_cpp_client_gets_the_same_bits_by_both_calls(tiny_model: Path) -> None:
    made = subprocess.run(["make", "-C", "ops/examples", "CXXFLAGS=-O0 -Wall -Wextra"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    with serving(tiny_model, experts_api=True) as server:
        done = subprocess.run([ROOT / "ops/examples/build/experts", server.target], capture_output=True, text=True, timeout=PATIENCE)
        refused = subprocess.run([ROOT / "ops/examples/build/experts", "127.0.0.1:1"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Execute: the same bits"
    assert refused.returncode == 1
    assert refused.stderr.startswith("experts: Execute: ")
