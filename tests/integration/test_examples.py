"""The example clients against a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.integration.serving import PATIENCE, ROOT, serving


def test_the_python_client_goes_through_all_layers(tiny_model: Path) -> None:
    with serving(tiny_model, experts_api=True) as server:
        command = [sys.executable, "-W", "error", "ops/examples/forward.py", server.target]
        done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE)
        layers = server.server.default.model.artifact.routed_layers
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [f"layer {layer}" for layer in layers]
    assert "nan" not in done.stdout
