"""The peers' programs, where they are and how they are run."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ops.bench.measure import BenchError
from ops.bench.peers.output import BenchLine, read_llama_bench

_PLACES = (".", "bin", "build/bin")
_PATIENCE = 600.0  # seconds


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine of the llama.cpp family: its name and the folder of its programs. Each is given the options it is fastest with."""

    name: str
    folder: Path
    repacks: bool = False  # ik_llama.cpp: -rtr and -fa are asked for, and depth is its -gp

    def program(self, name: str) -> Path:
        """BenchError if it was not built."""
        path = self.folder / name
        if not path.is_file():
            raise BenchError(f"{path} is not there: build it (cmake --build BUILD --target {name})")
        return path

    def prompt(self, *, tokens: int) -> list[str]:
        """llama-bench's options for reading a prompt."""
        return [*self.bench_extra, "-p", str(tokens), "-n", "0"]

    def generation(self, *, context: int, answer: int) -> list[str]:
        """llama-bench's options for one stream of generation behind `context` tokens."""
        if self.repacks:
            return [*self.bench_extra, "-p", "0", "-n", "0", "-gp", f"{context},{answer}"]
        return [*self.bench_extra, "-p", "0", "-n", str(answer), "-d", str(context)]

    @property
    def bench_extra(self) -> list[str]:
        """What llama-bench is given besides."""
        return ["-fa", "1", "-rtr", "1"] if self.repacks else []

    @property
    def server_extra(self) -> list[str]:
        """What llama-server is given besides."""
        return ["-fa", "on", "-rtr"] if self.repacks else []


def find_peer(name: str, folder: Path, *, repacks: bool) -> Peer:
    """Looks for llama-bench in a folder, its bin and its build/bin. BenchError."""
    for place in _PLACES:
        if (folder / place / "llama-bench").is_file():
            return Peer(name, (folder / place).resolve(), repacks)
    raise BenchError(f"no llama-bench in {folder} ({', '.join(_PLACES)}); build {name} and give the folder of its programs")


def quantise(peer: Peer, source: Path, kind: str, *, threads: int) -> Path:
    """The source as `kind` (Q4_0, ...), made by the peer's own llama-quantize on first use; F16 is the source."""
    if kind == "F16":
        return source
    out = source.with_name(f"{source.stem}.{kind}.{peer.name}.gguf")
    if not out.exists():
        unfinished = out.with_suffix(".part")
        run([str(peer.program("llama-quantize")), str(source), str(unfinished), kind, str(threads)])
        os.replace(unfinished, out)
    return out


def llama_bench(peer: Peer, model: Path, *, threads: int, options: list[str]) -> BenchLine:
    """One repetition, after the program's own warm-up, of the one test the options ask for."""
    command = [str(peer.program("llama-bench")), "-m", str(model), "-t", str(threads), "-r", "1", "-o", "json", *options]
    lines = read_llama_bench(run(command))
    if len(lines) != 1:
        raise BenchError(f"{' '.join(command)} ran {len(lines)} tests instead of one")
    return lines[0]


def run(command: list[str]) -> str:
    """What it printed on stdout. BenchError with the end of its stderr if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE, errors="replace")
    except subprocess.TimeoutExpired as cause:
        raise BenchError(f"{command[0]} did not end in {_PATIENCE:.0f} s") from cause
    if done.returncode:
        raise BenchError(f"{' '.join(command)} ended with exit code {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout
