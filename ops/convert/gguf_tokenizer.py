"""Rebuilds a tokenizer.json from a GGUF file's metadata: byte-level BPE, for the pre-tokenizers listed here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from ops.container_layout import Json
from ops.convert.errors import ConvertError

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# Split patterns of the models' published tokenizer.json files. GPT-2's own pattern is what ByteLevel does by itself.
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_REMEDY = "name a tokenizer.json with --tokenizer FILE, or go without: --tokenizer none"


def rebuild_tokenizer(path: Path, metadata: Mapping[str, Json]) -> str:
    """The text of a tokenizer.json with the vocabulary, merges and special tokens of `metadata`."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2":
        raise ConvertError(f"{path}: tokenizer.ggml.model is {model!r}; only gpt2 (byte-level BPE) can be rebuilt. {_REMEDY}")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ConvertError(f"{path}: tokenizer.ggml.pre is {pre!r}, which is not known here (known: {known}). {_REMEDY}")
    tokens = _strings(path, metadata, "tokenizer.ggml.tokens")
    merges = [_pair(path, merge) for merge in _strings(path, metadata, "tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ConvertError(f"{path}: tokenizer.ggml.tokens has {len(tokens) - len(vocab)} tokens twice. {_REMEDY}")
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises plain Exception
        raise ConvertError(f"{path}: vocabulary and merges do not fit together: {error}. {_REMEDY}") from error
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[str(pre)]
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, tokens, metadata)
    _add_bos(tokenizer, tokens, metadata)
    return str(tokenizer.to_str())


def _split(pattern: str) -> PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level])


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


_PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
    "gpt-2": _gpt2(),
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
}


def _add_special(tokenizer: Tokenizer, tokens: list[str], metadata: Mapping[str, Json]) -> None:
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list):
        return
    marked = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in marked if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in marked if kind == _USER_DEFINED])


def _add_bos(tokenizer: Tokenizer, tokens: list[str], metadata: Mapping[str, Json]) -> None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") is not True or not isinstance(bos, int) or bos >= len(tokens):
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
    )


def _strings(path: Path, metadata: Mapping[str, Json], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConvertError(f"{path}: {key} is missing or no list of strings. {_REMEDY}")
    return [str(item) for item in value]


def _pair(path: Path, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ConvertError(f"{path}: tokenizer.ggml.merges has {merge!r}, which is no pair. {_REMEDY}")
    return left, right
