"""What a server imports before it listens: every package here would add a tenth of a second or so to each start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SLOW = {"numpy", "tokenizers", "jinja2", "pydantic", "rich", "hashlib"}
SCRIPT = """
import sys
from ops.cli import run
run(["serve", "/nowhere.colibri"])
before = set(sys.modules)
import service.opening, service.server
print(sorted(before), sorted(sys.modules), sep="\\n")
"""


def test_starting_imports_only_what_every_server_needs() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, cwd=ROOT)
    parsing, serving = ({name.strip("'") for name in line.strip("[]").split(", ")} for line in done.stdout.splitlines())
    assert {"typer", "service.config"} <= parsing
    assert not parsing & {*SLOW, "grpc", "asyncio"}
    assert {"grpc.aio", "service.inference"} <= serving
    assert not serving & (SLOW - {"hashlib"})  # placements are found by digests
