"""Shows an answer as it streams in, and what it cost. The text goes to stdout, the figures to stderr, so a pipe gets the text alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ops.commands.common import CommandError

if TYPE_CHECKING:
    from colibri.v1 import inference_pb2 as pb

# A model's text must not steer the terminal: control characters but newline and tab are shown as U+FFFD.
_PRINTABLE = {code: "\N{REPLACEMENT CHARACTER}" for code in [*range(32), 127, *range(0x80, 0xA0)] if chr(code) not in "\n\t"}

Target = Annotated[str, typer.Option("--target", "-t", help="Server, HOST:PORT or unix:PATH.")]
ModelName = Annotated[str, typer.Option("--model", help="Name of the model; empty: the one that is served.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, max=2**32 - 1, help="Tokens at most.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 is greedy; default: the model's own.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Keep the likeliest tokens up to this sum.")]
TopK = Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="Keep this many likeliest tokens; 0 is off.")]
Seed = Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")]
Timeout = Annotated[float | None, typer.Option(min=0.001, help="Deadline in seconds.")]


@dataclass(frozen=True, slots=True)
class Streamed:
    """A whole answer. `first_s`: seconds from the call to the first text, by the client's clock."""

    text: str
    finish: pb.Finish
    first_s: float

    def summary(self) -> str:
        """Usage, speed and why it ended, on one line."""
        usage = self.finish.usage
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        parts = [f"{usage.prompt_tokens} prompt tokens{cached}", f"{usage.completion_tokens} generated, {self._reason()}"]
        parts.append(f"first after {self.first_s * 1000:.0f} ms")
        if self.finish.routed:
            parts.append(f"{self.finish.rerouted / self.finish.routed:.2%} rerouted")
        rest_ms = self.finish.timings.decode_ms  # the server's: what comes in one packet would look as if it had taken no time
        if usage.completion_tokens > 1 and rest_ms > 0:
            parts.append(f"{1000 * (usage.completion_tokens - 1) / rest_ms:.1f} tokens/s")
        return "; ".join(parts)

    def _reason(self) -> str:
        return {1: "stopped", 2: "length reached", 3: "broken off"}.get(self.finish.reason, "ended")


def show_stream(events: Iterable[pb.Delta | pb.Finish], *, write: Callable[[str], None]) -> Streamed:
    """Passes each delta's text to `write` as it comes. Raises CommandError if the stream ends without its terminal message."""
    from colibri.v1 import inference_pb2 as pb

    begin = time.perf_counter()
    first: float | None = None
    texts, finish = [], None
    for event in events:
        if isinstance(event, pb.Finish):
            finish = event
            continue
        first = first or time.perf_counter()
        texts.append(event.text)
        write(event.text)
    if finish is None:
        raise CommandError("the server's answer ended without its terminal message: not a Colibri server?")
    return Streamed("".join(texts), finish, (first or time.perf_counter()) - begin)


def write_text(text: str) -> None:
    """To stdout at once; made harmless if that is a terminal."""
    sys.stdout.write(text.translate(_PRINTABLE) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_note(text: str) -> None:
    """A remark beside the text: on stderr, dim on a terminal."""
    dim = sys.stderr.isatty()
    print(f"\033[2m{text}\033[0m" if dim else text, file=sys.stderr, flush=True)
