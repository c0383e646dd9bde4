"""`make bench`: prefill, decode and batches on random-weight models, made on first use under build/bench.

python -m ops.bench [SHAPE:QUANT ...]      default: mm:int8 mm:int4
"""

from __future__ import annotations

import sys
from pathlib import Path

from ops.cli import run

MODELS = Path("build/bench")
DEFAULT = ("mm:int8", "mm:int4")
CASES = (("prefill", "--tokens", "512"), ("batch", "--streams", "1,8,32"))


def bench_model(wish: str) -> int:
    """Makes the model if need be and runs every case on it. Returns the first exit code that is not 0."""
    shape, _, quant = wish.partition(":")
    quant = quant or "int8"
    path = MODELS / f"{shape.replace(',', '-')}-{quant}.colibri"
    if not path.is_file():
        MODELS.mkdir(parents=True, exist_ok=True)
        if code := run(["bench", "make-model", "--shape", shape, "--quant", quant, str(path)]):
            return code
    for name, *options in CASES:
        if code := run(["bench", name, str(path), *options]):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(next((code for wish in sys.argv[1:] or DEFAULT if (code := bench_model(wish))), 0))
