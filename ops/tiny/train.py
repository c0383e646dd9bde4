"""Trains the model on the token files of `ops.tiny.data`; resumes by itself from the newest checkpoint in RUN.

    python -m ops.tiny.train --data DATA --run RUN --steps 3000

Which tokens a step sees depends on seed and step alone, so a run that was stopped goes on as if it had not been. `--finish-at-step`
brings the learning rate to zero early, linearly."""

from __future__ import annotations

import argparse
import csv
import math
import os
import signal
import time
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ops.tiny.model import Shape, TinyMoE, balance_loss
from ops.tiny.schedule import BOS_ID, PEAK_RATE, SHORT, Tokens, batch, context_at, load_tokens, rate
from ops.tiny.splits import KINDS

WEIGHT_DECAY, CLIP, AUXILIARY = 0.1, 1.0, 0.01
LOG_EVERY, CHECKPOINT_EVERY = 10, 250
VALIDATION_WINDOWS = 12  # of each kind, SHORT tokens each, spread over the text
COLUMNS = ("step", "rate", "loss", *KINDS, "balance", "seconds", *(f"validation_{kind}" for kind in KINDS))


class Stopped:
    """Set by SIGTERM or SIGINT: the step ends, a checkpoint is written."""

    def __init__(self) -> None:
        self.yes = False
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        self.yes = True


def losses(model: TinyMoE, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of every row, and the balance loss averaged over the layers."""
    logits, routes = model(windows[:, :-1])
    entropy = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").view(len(windows), -1).mean(1)
    balance = torch.stack([balance_loss(gates, chosen) for gates, chosen in routes]).mean()
    return entropy, balance


@torch.no_grad()
def validate(model: TinyMoE, tokens: Tokens) -> dict[str, float]:
    """Mean loss of each kind on windows that begin with `<s>`."""
    found = {}
    model.eval()
    for kind, ids in tokens.items():
        starts = np.linspace(0, len(ids) - SHORT - 1, VALIDATION_WINDOWS).astype(int)
        windows = np.stack([ids[start : start + SHORT + 1].astype(np.int64) for start in starts])
        windows[:, 0] = BOS_ID
        found[kind] = float(losses(model, torch.from_numpy(windows))[0].mean())
    model.train()
    return found


def optimizer_for(model: TinyMoE) -> torch.optim.AdamW:
    """AdamW; norms do not decay."""
    decaying = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decaying, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)


def checkpoints(run: Path) -> list[Path]:
    """Oldest first."""
    return sorted(run.glob("step-*.pt"), key=lambda path: int(path.stem.split("-")[1]))


def save(run: Path, model: TinyMoE, optimizer: torch.optim.AdamW, step: int) -> None:
    """After `step` steps; whole or not at all."""
    path = run / f"step-{step}.pt"
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def resume(run: Path, model: TinyMoE, optimizer: torch.optim.AdamW) -> int:
    """Steps already done."""
    found = checkpoints(run)
    if not found:
        return 0
    state = torch.load(found[-1], weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def train(options: argparse.Namespace) -> None:
    """The loop: a step, now and then a line of the log, a validation, a checkpoint."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    tokens, held_out = load_tokens(options.data, "train"), load_tokens(options.data, "validation")
    model = TinyMoE(Shape())
    optimizer = optimizer_for(model)
    begin, stopped = resume(options.run, model, optimizer), Stopped()
    end = options.finish_at_step or options.steps
    finish = (options.finish_from_step or begin, end) if options.finish_at_step else None
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; steps {begin} to {end}", flush=True)
    window = Window()
    for step in range(begin, end):
        rows, kinds = batch(tokens, step=step, seed=options.seed, context=context_at(step, end=end))
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps=options.steps, finish=finish)
        entropy, balance = losses(model, torch.from_numpy(rows))
        (entropy.mean() + AUXILIARY * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        window.add(entropy, kinds, balance)
        done = step + 1
        last = done == end or stopped.yes
        kept = last or done % CHECKPOINT_EVERY == 0
        if kept:
            save(options.run, model, optimizer, done)
        if kept or done % LOG_EVERY == 0:
            write_row(options.run / "loss.csv", window.row(done, group["lr"], validate(model, held_out) if kept else {}))
            window = Window()
        if last:
            return


class Window:
    """What happened since the last line of the log."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.losses: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.balance: list[float] = []

    def add(self, entropy: Tensor, kinds: list[str], balance: Tensor) -> None:
        for kind, value in zip(kinds, entropy.detach().tolist(), strict=True):
            self.losses[kind].append(value)
        self.balance.append(float(balance.detach()))

    def row(self, step: int, learning_rate: float, validation: dict[str, float]) -> list[str]:
        """A line in the order of COLUMNS. `seconds` is a step's, validation left out."""
        every = [value for values in self.losses.values() for value in values]
        figures = [np.mean(every), *(np.mean(values) if values else math.nan for values in self.losses.values()), np.mean(self.balance)]
        seconds = (time.monotonic() - self.began) / len(self.balance)
        told = [f"{validation[kind]:.4f}" if validation else "" for kind in KINDS]
        return [str(step), f"{learning_rate:.3e}", *(f"{figure:.4f}" for figure in figures), f"{seconds:.2f}", *told]


def write_row(path: Path, row: list[str]) -> None:
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        writer.writerow(row)
    print(" ".join(f"{name}={value}" for name, value in zip(COLUMNS, row, strict=True) if value), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="folder of checkpoints and loss.csv")
    parser.add_argument("--steps", type=int, default=3000, help="length of the schedule")
    parser.add_argument("--finish-at-step", type=int, help="end there, the learning rate going to zero")
    parser.add_argument("--finish-from-step", type=int, help="it does so from there on; the resumed step if not given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.run.mkdir(parents=True, exist_ok=True)
    train(options)


if __name__ == "__main__":
    main()
