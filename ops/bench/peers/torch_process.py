"""An interpreter that has torch, running ops/bench/torch_peer.py: asked one thing at a time, idle between."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ops.bench.measure import BenchError
from ops.random_model import ModelShape

_SCRIPT = Path(__file__).parent.parent / "torch_peer.py"
_PATIENCE = 300.0  # seconds an answer may take


@dataclass(frozen=True, slots=True)
class TorchWish:
    """Which interpreter, how many threads, and the model it makes at its start (None: none)."""

    python: Path
    threads: int
    shape: ModelShape | None = None
    seed: int = 1

    def command(self) -> list[str]:
        """Its command line."""
        wish = {"threads": self.threads, "shape": _described(self.shape) if self.shape else None, "seed": self.seed}
        return [str(self.python), str(_SCRIPT), json.dumps(wish)]


class TorchProcess:
    """Close it after. BenchError if the interpreter is none, lacks torch, or fails."""

    def __init__(self, wish: TorchWish) -> None:
        self._python = wish.python
        try:
            self._process = subprocess.Popen(wish.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as cause:
            why = f"--torch-python {wish.python}: {cause.strerror}; give the interpreter of an environment with torch"
            raise BenchError(why) from cause
        try:
            self.version = str(self._answer()["torch"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def ask(self, wish: Mapping[str, object]) -> dict[str, float]:
        """Its answer's numbers."""
        return {name: float(str(value)) for name, value in self._asked(wish).items()}

    def ask_samples(self, wish: Mapping[str, object], name: str) -> tuple[float, ...]:
        """One list of numbers of its answer."""
        samples = self._asked(wish)[name]
        assert isinstance(samples, list)
        return tuple(map(float, samples))

    def _asked(self, wish: Mapping[str, object]) -> dict[str, object]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(wish) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it says why, or its end does
        return self._answer()

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout is not None
        timer = threading.Timer(_PATIENCE, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        try:
            answer = json.loads(line)
        except ValueError:
            code = self._process.wait()
            raise BenchError(f"{self._python} ended with exit code {code} instead of an answer; its messages are above") from None
        if not isinstance(answer, dict):
            raise BenchError(f"{self._python} answered {line!r}, which is no JSON object")
        if "error" in answer:
            raise BenchError(f"{self._python}: {answer['error']}")
        return answer


def _described(shape: ModelShape) -> dict[str, object]:
    names = ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn", "experts", "top_k", "max_context", "norm_eps", "qk_norm")
    return {name: getattr(shape, name) for name in names} | {"head_dim": shape.head_size}
