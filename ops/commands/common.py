"""What the commands share: errors as one line, model names, number lists, output that suits a terminal or a pipe."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

USAGE, FAILURE = 2, 1

_UNLIMITED = 1 << 20  # columns: who reads a pipe wants whole lines

# Exceptions whose sentence is meant for the user. Looked up only in modules already imported: what a command did not import it cannot
# have raised.
_USER_ERRORS = (
    ("engine_c", "EngineError"),
    ("ops.bench.perplexity", "PerplexityError"),
    ("ops.bench.measure", "BenchError"),
    ("ops.container_layout", "ContainerError"),
    ("ops.convert.errors", "ConvertError"),
    ("ops.logits", "LogitsError"),
    ("ops.models", "ModelError"),
    ("service.config", "ConfigError"),
    ("service.artifact", "ArtifactError"),
    ("service.recording", "RecordingError"),
    ("service.faults", "Fault"),
    ("workers.plan", "PlanError"),
    ("workers.segments", "SegmentError"),
    ("workers.supervisor", "SupervisorError"),
)


class CommandError(Exception):
    """A command failed; the sentence names the thing and the remedy."""


def describe_failure(failure: Exception) -> tuple[int, str] | None:
    """(exit code, sentence) of an expected failure; None if it is a bug and deserves its traceback."""
    if isinstance(failure, CommandError):
        return FAILURE, str(failure)
    if callable(message := getattr(failure, "format_message", None)):  # typer's usage errors
        context = getattr(failure, "ctx", None)
        hint = f" (see `{context.command_path} --help`)" if context is not None else ""
        return int(getattr(failure, "exit_code", USAGE)), " ".join(str(message()).split()) + hint
    for module, name in _USER_ERRORS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(failure, kind):
            sentence = " ".join(str(failure).split())
            return FAILURE, _as_options(sentence) if name == "ConfigError" else sentence
    if (grpc := sys.modules.get("grpc")) is not None and isinstance(failure, grpc.RpcError):
        return FAILURE, describe_rpc(failure)
    if isinstance(failure, OSError):
        where = f"{failure.filename}: " if failure.filename else ""
        return FAILURE, f"{where}{failure.strerror or failure}"
    return None


def _as_options(sentence: str) -> str:
    """Settings of nodes and TLS as the options that they are here: --nodes-cert for nodes_cert. Not in paths."""
    sentence = re.sub(r"\bnodes_insecure=on\b", "nodes_insecure", sentence)
    return re.sub(r"(?<![\w./-])(nodes|tls)_[a-z_]+(?![\w/-]|\.\w)", lambda found: "--" + found[0].replace("_", "-"), sentence)


def describe_rpc(failure: Exception, *, starts: str = "`colibri serve`") -> str:
    """A gRPC failure as a sentence with its status code. starts: what starts a server such as was asked."""
    code, details = getattr(failure, "code", None), getattr(failure, "details", None)
    name = code().name if callable(code) and code() is not None else "UNKNOWN"
    sentence = printable(str(details() if callable(details) else failure))
    unreachable = name == "UNAVAILABLE" and ("failed to connect" in sentence or "resolv" in sentence)
    trailers = getattr(failure, "trailing_metadata", None)
    unreachable = unreachable and not (callable(trailers) and trailers())  # else a server answered, about another one perhaps
    remedy = f" (is the server running? start one with {starts})" if unreachable else ""
    if name == "UNIMPLEMENTED" and sentence == "Method not found!":
        return f"{name}: this server does not know the call; if it is a node, ask a front end (`colibri serve`) instead"
    if unreachable and "handshake" in sentence:
        remedy = " (do certificate, key and authority belong together, and is the server's certificate for that host?)"
    return f"{name}: {sentence}{remedy}"


def model_file(model: str) -> Path:
    """What a MODEL argument means: the file of a name (ops.models), made now if need be, else a path, looked at later."""
    from ops.models import NAMES, resolve

    if model not in NAMES:
        return Path(model)
    from service.config import cache_dir

    return resolve(model, cache=cache_dir()).path


ModelFile = Annotated[Path, typer.Argument(metavar="MODEL", parser=model_file, help="A .colibri file, or demo, tiny or random.")]


def container_path(path: Path) -> Path:
    """Checks that a container is there, so that the error is ours and short."""
    if not path.is_file():
        what = "is a directory, not a container" if path.is_dir() else "is not a regular file" if path.exists() else "does not exist"
        raise CommandError(f"{path} {what}; make one with `colibri convert SRC OUT.colibri`")
    return path


def check_output(out: Path) -> None:
    """Refuses a place that a finished file cannot be renamed to, or where that would do harm: root's would replace /dev/null."""
    if out.is_dir():
        raise CommandError(f"{out} is a directory; name the file to write")
    if out.exists() and (out.is_symlink() or not out.is_file()):
        raise CommandError(f"{out} is {'a link' if out.is_symlink() else 'no regular file'}; name the file to write")
    if not out.parent.is_dir():
        raise CommandError(f"{out.parent} is not a directory; make it first")


def parse_ints(text: str, *, option: str) -> list[int]:
    """'1,2,3' or '1 2 3' as a list; '@file' reads it from a file."""
    if text.startswith("@"):
        text = Path(text[1:]).read_text(encoding="utf-8")
    words = text.replace(",", " ").split()
    if not words:
        raise typer.BadParameter(f"{option} is empty")
    return [_whole_number(word, option) for word in words]


def _whole_number(word: str, option: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise typer.BadParameter(f"{option} takes whole numbers separated by commas, not {word!r}") from None


def console(*, stderr: bool = False) -> Console:
    """A rich console on stdout (or stderr) that is plain, and wraps and cuts nothing, when that is not a terminal."""
    from rich.console import Console

    return Console(highlight=False, stderr=stderr, width=None if (sys.stderr if stderr else sys.stdout).isatty() else _UNLIMITED)


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
