"""Perplexity and specialisation on held-out texts, of a container (on the engine) or of a checkpoint (in torch).

    python -m ops.tiny.evaluate tiny.colibri [--texts FOLDER] [--json]
    python -m ops.tiny.evaluate RUN/step-3000.pt --tokenizer DATA/tokenizer.json

Windows of 512 tokens that begin with `<s>` in place of their first; every other token is predicted from those before it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ops.tiny.figures import Trace, all_figures, table
from ops.tiny.schedule import BOS_ID
from ops.tiny.splits import KINDS

WINDOW = 512
EXPERTS = 8
TEXTS = Path(__file__).parent / "texts"


def windows(text: str, tokenizer: Tokenizer, *, length: int = WINDOW) -> Iterator[list[int]]:
    """Token ids in pieces of length + 1, the last token of one being the first, unscored one, of the next; a rest is left out."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for start in range(0, len(ids) - length, length):
        yield [BOS_ID, *ids[start + 1 : start + length + 1]]


def read_texts(folder: Path) -> dict[str, str]:
    """The text of each kind."""
    return {kind: (folder / f"{kind}.txt").read_text(encoding="utf-8") for kind in KINDS}


def trace_container(path: Path, texts: dict[str, str], *, window: int = WINDOW) -> dict[str, Trace]:
    """As the engine serves it; keys and values in f32."""
    from ops.container import Container
    from ops.logits import compute_logits

    with Container.open(path) as container:
        tokenizer = Tokenizer.from_str(container.blob("tokenizer.json").decode())
    found = {}
    for kind, text in texts.items():
        logprobs, experts = [], []
        for ids in windows(text, tokenizer, length=window):
            result = compute_logits(path, tokens=ids[:-1])
            logprobs.append(own_logprobs(result.logits, ids))
            experts.append(result.experts)
        found[kind] = Trace(np.concatenate(logprobs), np.concatenate(experts, axis=1), None, window)
    return found


def own_logprobs(logits: NDArray[np.float32], ids: list[int]) -> NDArray[np.float64]:
    """Log-probability of each next token."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    total = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
    own: NDArray[np.float64] = wide[np.arange(len(wide)), ids[1:]] - total
    return own


def trace_checkpoint(path: Path, tokenizer: Tokenizer, texts: dict[str, str], *, window: int = WINDOW) -> dict[str, Trace]:
    """In torch, f32."""
    import torch

    from ops.tiny.model import Shape, TinyMoE

    model = TinyMoE(Shape())
    model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu")["model"])
    model.eval()
    found = {}
    for kind, text in texts.items():
        logprobs, experts, gates = [], [], []
        for ids in windows(text, tokenizer, length=window):
            with torch.no_grad():
                logits, routes = model(torch.tensor([ids[:-1]]))
            logprobs.append(own_logprobs(logits[0].numpy(), ids))
            gates.append(np.stack([gate.numpy() for gate, _ in routes]))
            experts.append(np.stack([chosen.numpy() for _, chosen in routes]).astype(np.int32))
        found[kind] = Trace(np.concatenate(logprobs), np.concatenate(experts, axis=1), np.concatenate(gates, axis=1), window)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a .colibri file or a .pt checkpoint")
    parser.add_argument("--texts", type=Path, default=TEXTS, help="folder with <kind>.txt")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of a checkpoint")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    texts = read_texts(options.texts)
    if options.model.suffix == ".pt":
        traces = trace_checkpoint(options.model, Tokenizer.from_file(str(options.tokenizer)), texts)
    else:
        traces = trace_container(options.model, texts)
    found = all_figures(traces, experts=EXPERTS)
    print(json.dumps({kind: asdict(of) for kind, of in found.items()}, indent=1) if options.json else "\n".join(table(found)))


if __name__ == "__main__":
    main()
