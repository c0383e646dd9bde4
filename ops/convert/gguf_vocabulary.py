"""What the tokenizers of GGUF files have in common: their lists of tokens and kinds, special tokens, the first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, processors

from ops.container_layout import Json
from ops.convert.errors import ConvertError

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

REMEDY = "name a tokenizer.json with --tokenizer FILE, or go without: --tokenizer none"


def strings(path: Path, metadata: Mapping[str, Json], key: str) -> list[str]:
    """A setting that must be a list of strings."""
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConvertError(f"{path}: {key} is missing or no list of strings. {REMEDY}")
    return [str(item) for item in value]


def ids_of(path: Path, tokens: Sequence[str]) -> dict[str, int]:
    """Token to id; a token that is there twice is an error."""
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ConvertError(f"{path}: tokenizer.ggml.tokens has {len(tokens) - len(vocab)} tokens twice. {REMEDY}")
    return vocab


def add_marked(tokenizer: Tokenizer, tokens: Sequence[str], *, special: Sequence[int], plain: Sequence[int]) -> None:
    """Tokens, by id, that are found in a text before anything else is done with it; `special` ones are no text when decoded."""
    tokenizer.add_special_tokens([AddedToken(tokens[index], normalized=False) for index in special])
    tokenizer.add_tokens([AddedToken(tokens[index], normalized=False) for index in plain])


def add_bos(tokenizer: Tokenizer, tokens: Sequence[str], metadata: Mapping[str, Json]) -> None:
    """Makes the tokenizer put the first token before a text, if the model wants it."""
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") is not True or not isinstance(bos, int) or not 0 <= bos < len(tokens):
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
    )
