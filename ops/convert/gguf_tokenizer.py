"""Rebuilds a tokenizer.json from a GGUF file's metadata: byte-level BPE for the pre-tokenizers listed here, SentencePiece BPE."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from ops.container_layout import Json
from ops.convert.errors import ConvertError
from ops.convert.gguf_spm import spm_tokenizer, with_defaults
from ops.convert.gguf_vocabulary import CONTROL, REMEDY, USER_DEFINED, add_bos, add_marked, ids_of, strings

# Split patterns of the models' published tokenizer.json files. GPT-2's own pattern is what ByteLevel does by itself.
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def rebuild_tokenizer(path: Path, metadata: Mapping[str, Json]) -> str:
    """The text of a tokenizer.json with the vocabulary, merges and special tokens of `metadata`."""
    metadata, model = with_defaults(metadata), metadata.get("tokenizer.ggml.model")
    if model == "llama":
        return str(spm_tokenizer(path, metadata).to_str())
    if model == "gpt2":
        return str(_byte_level(path, metadata).to_str())
    known = "gpt2 (byte-level BPE) and llama (SentencePiece BPE)"
    raise ConvertError(f"{path}: tokenizer.ggml.model is {model!r}; only {known} can be rebuilt. {REMEDY}")


def _byte_level(path: Path, metadata: Mapping[str, Json]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ConvertError(f"{path}: tokenizer.ggml.pre is {pre!r}, which is not known here (known: {known}). {REMEDY}")
    tokens = strings(path, metadata, "tokenizer.ggml.tokens")
    merges = [_pair(path, merge) for merge in strings(path, metadata, "tokenizer.ggml.merges")]
    vocab = ids_of(path, tokens)
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises plain Exception
        raise ConvertError(f"{path}: vocabulary and merges do not fit together: {error}. {REMEDY}") from error
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[str(pre)]
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, tokens, metadata)
    add_bos(tokenizer, tokens, metadata)
    return tokenizer


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
    within = list(enumerate(kinds[: len(tokens)]))
    special, plain = ([index for index, kind in within if kind == wanted] for wanted in (CONTROL, USER_DEFINED))
    add_marked(tokenizer, tokens, special=special, plain=plain)


def _pair(path: Path, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ConvertError(f"{path}: tokenizer.ggml.merges has {merge!r}, which is no pair. {REMEDY}")
    return left, right
