"""Checkpoints to containers: Hugging Face folders and GGUF files in, one `.colibri` file out."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine_c import EngineError, Model, version
from ops.container_layout import ContainerError, Json, file_bytes
from ops.container_writer import ContainerWriter, descriptor_reserve
from ops.convert.arch import Arch, resolve
from ops.convert.errors import ConvertError
from ops.convert.families import table_for
from ops.convert.gguf import GGUFSource
from ops.convert.huggingface import HuggingFaceSource
from ops.convert.pipeline import Progress, write_tensors
from ops.convert.plan import Plan, build_plan, formats_of
from ops.convert.source import Source, Texts
from ops.convert.tokenizer import check_tokenizer, generation_defaults
from ops.convert.upcycle import parse_recipe, upcycle as upcycled

__all__ = ["ConvertError", "ConvertReport", "convert"]


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion made."""

    out: Path
    family: str
    quant: str
    head: str
    """format of the head, and of an embedding tied to it"""
    tensors: int
    parameters: int
    file_bytes: int
    seconds: float
    tokenizer: bool  # False: the model takes token ids only


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    quant: str = "int8",
    head: str | None = None,
    upcycle: str | None = None,
    descriptor: Path | None = None,
    progress: Progress | None = None,
    tokenizer: str = "auto",
    seed: int = 0,
    sampling: Mapping[str, float] | None = None,
) -> ConvertReport:
    """Converts a Hugging Face folder (or one .safetensors file in it) or a GGUF file.

    `quant`: f32, bf16, int8 or int4 (embedding and head int8). `head`: another format for the head, and for an embedding tied to it.
    `upcycle`: "pairs=N" makes 2N experts of a dense model, split by `seed`.
    `descriptor`: a family table of the caller's own. `tokenizer`: "auto" takes the source's, "none" leaves it out, else a tokenizer.json.
    `sampling`: temperature and top_p of requests that do not say, in place of the source's.
    `progress` is called after each tensor with bytes done, bytes in all and the tensor's name.
    Raises ConvertError naming what is wrong and what would help; then, and on an interrupt, nothing is left of `out`."""
    started = time.monotonic()
    source, out = Path(source), Path(out)
    formats = formats_of(quant, head)
    pairs = parse_recipe(upcycle) if upcycle is not None else None
    opened = _open(source)
    try:
        if out.exists() and out.resolve() in (opened.path.resolve(), source.resolve()):
            raise ConvertError(f"{out}: is the source itself; write elsewhere")
        table = table_for(opened.family, descriptor)
        plan = build_plan(opened, table, resolve(table, opened), formats)
        if pairs is not None:
            plan = upcycled(plan, pairs, seed=seed)
        texts = opened.texts(with_tokenizer=tokenizer == "auto")
        texts = replace(texts, generation={**texts.generation, **(sampling or {})})
        embedded = _tokenizer_text(texts, tokenizer)
        size = _write(out, plan, texts, embedded, quant, _provenance(opened, texts, upcycle, seed), progress)
    except ContainerError as error:
        raise ConvertError(str(error)) from error
    except MemoryError as error:
        raise ConvertError(f"{source}: a tensor does not fit into memory; the largest one must") from error
    finally:
        opened.close()
    seconds = time.monotonic() - started
    return ConvertReport(out, table.family, quant, formats.head, len(plan.jobs), _parameters(plan.arch), size, seconds, bool(embedded))


def _open(source: Path) -> Source:
    if source.is_file() and source.suffix == ".gguf":
        return GGUFSource(source)
    if source.is_dir() or (source.is_file() and source.suffix == ".safetensors"):
        return HuggingFaceSource(source)
    if source.exists():
        raise ConvertError(f"{source}: is neither a folder with config.json, nor a .safetensors or .gguf file")
    raise ConvertError(f"{source}: does not exist")


def _write(
    out: Path, plan: Plan, texts: Texts, tokenizer: str, quant: str, provenance: Mapping[str, Json], progress: Progress | None
) -> int:
    generation = generation_defaults(texts, tokenizer, plan.arch.vocab, str(provenance["source"]))
    descriptor: dict[str, Json] = {
        "name": texts.name or out.stem,
        "requires": [],
        "arch": plan.arch.to_json(),
        "router": plan.arch.router_json(),
        "quant": quant,
        "generation": generation,
        "provenance": dict(provenance),
    }
    parts = {"tokenizer.json": tokenizer, "chat_template": texts.chat_template, "config.json": texts.config, "licence": texts.licence_text}
    blobs = {name: text.encode() for name, text in parts.items() if text}
    needed = file_bytes((job.entry for job in plan.jobs), blobs, descriptor_reserve(descriptor))
    with ContainerWriter(out, descriptor, needed_bytes=needed) as writer:
        for name, data in blobs.items():
            writer.add_blob(name, data)
        write_tensors(writer, plan.jobs, progress)
        return writer.commit(check=_engine_accepts)


def _engine_accepts(path: Path) -> None:
    """A model the engine would not open is not worth writing: its sizes are beyond a limit of the engine."""
    try:
        Model.open(path).close()
    except EngineError as error:
        raise ConvertError(f"the engine does not accept the model: {error}") from error


def _tokenizer_text(texts: Texts, choice: str) -> str:
    """The tokenizer.json to embed, checked to be one."""
    if choice == "none":
        return ""
    text, where = texts.tokenizer, "the source's tokenizer"
    if choice != "auto":
        where = choice
        try:
            text = Path(choice).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConvertError(f"{choice}: cannot be read: {reason}; name a tokenizer.json") from error
    if text:
        check_tokenizer(text, where)
    return text


def _provenance(source: Source, texts: Texts, recipe: str | None, seed: int) -> dict[str, Json]:
    notes = f"upcycled from a dense model: {recipe}, seed {seed}; computes what the dense model computes" if recipe else ""
    return {
        "source": " ".join(filter(None, (source.path.resolve().name, texts.description))),
        "licence": texts.licence_name,
        "converter": f"colibri {version()}",
        "notes": notes,
    }


def _parameters(arch: Arch) -> int:
    """Weights of the linears, experts, router, embedding and head; norms are left out."""
    attention = arch.hidden * arch.head_dim * (2 * arch.heads + 2 * arch.kv_heads)
    router = arch.experts * arch.hidden if arch.experts > 1 else 0
    layer = attention + router + 3 * arch.experts * arch.ffn * arch.hidden
    return arch.layers * layer + (1 if arch.tied else 2) * arch.vocab * arch.hidden
