"""Checks the tokenizer that is embedded, and gathers what generation starts from."""

from __future__ import annotations

import json
import math

from tokenizers import Tokenizer

from ops.container_layout import Json
from ops.convert.errors import ConvertError
from ops.convert.source import Texts

_NUMBERS = {"temperature": 1.0, "top_p": 1.0}


def check_tokenizer(text: str, where: str) -> None:
    """Raises ConvertError if `text` is no tokenizer.json the tokenizers library reads."""
    _load(text, where)


def generation_defaults(texts: Texts, tokenizer: str, vocab: int, where: str) -> dict[str, Json]:
    """The container's "generation" object. Ids outside the vocabulary are an error: they could never be produced or fed."""
    given = texts.generation
    bos = _token(given.get("bos_token_id"), "bos_token_id", vocab, where)
    ends = given.get("eos_token_id")
    eos = [_token(end, "eos_token_id", vocab, where) for end in (ends if isinstance(ends, list) else [ends])]
    if tokenizer:
        _check_ids(tokenizer, vocab, where)
    result: dict[str, Json] = {
        "eos_token_ids": [end for end in eos if end is not None],
        "bos_token_id": bos,
        "pad_token_id": _token(given.get("pad_token_id"), "pad_token_id", vocab, where),
        "add_bos": bos is not None and (given.get("add_bos") is True or _starts_with(tokenizer, bos, where)),
        "top_k": _count(given.get("top_k"), "top_k", where),
    }
    for key, default in _NUMBERS.items():
        value = given.get(key)
        result[key] = default if value is None else _number(value, key, where)
    return result


def _load(text: str, where: str) -> Tokenizer:
    try:
        json.loads(text)
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise ConvertError(f"{where}: is no tokenizer.json: {error}") from error


def _check_ids(tokenizer: str, vocab: int, where: str) -> None:
    largest = max(_load(tokenizer, where).get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab:
        raise ConvertError(f"{where}: the tokenizer has a token {largest}, the model has {vocab}; they do not belong together")


def _starts_with(tokenizer: str, bos: int | None, where: str) -> bool:
    """Whether the tokenizer itself puts the first token before a text."""
    if not tokenizer or bos is None:
        return False
    loaded = _load(tokenizer, where)
    ids = loaded.encode("a", add_special_tokens=True).ids
    return ids[:1] == [bos] and ids != loaded.encode("a", add_special_tokens=False).ids


def _token(value: Json, key: str, vocab: int, where: str) -> int | None:
    if value is None or (isinstance(value, int) and value < 0):  # -1 is how some say none
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value >= vocab:
        raise ConvertError(f"{where}: {key} is {value!r}, the model has tokens 0..{vocab - 1}")
    return value


def _count(value: Json, key: str, where: str) -> int:
    number = 0 if value is None else _number(value, key, where)
    return int(number)


def _number(value: Json, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConvertError(f"{where}: generation's {key} is {value!r}, wanted a number of 0 or more")
    return float(value)
