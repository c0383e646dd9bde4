"""Rebuilds a tokenizer.json from the SentencePiece BPE vocabulary of a GGUF file (`tokenizer.ggml.model` "llama").

SentencePiece has no list of merges: of all neighbours whose concatenation is a piece it joins those of the highest score, the leftmost
first among equals, until nothing can be joined. The tokenizers library joins by a list. Every way to put a piece together becomes an entry
of it, by descending score; the library, too, takes the leftmost first where an entry applies twice. Pieces of different scores come out
alike; where equal scores could make a difference the file is refused.

Special and user-defined tokens are cut out of a text first, and the text after each begins with the space prefix again, as llama.cpp and
the Llama and Mixtral tokenizer.json files do. (SentencePiece itself reads no special tokens in a text.) As in llama.cpp, tokens marked
unused are joined and given out like others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers

from ops.container_layout import Json
from ops.convert.errors import ConvertError
from ops.convert.gguf_vocabulary import BYTE, CONTROL, NORMAL, REMEDY, UNKNOWN, UNUSED, USER_DEFINED, add_bos, add_marked, ids_of, strings

_SPACE = "▁"
_PREFIX = "tokenizer.ggml"
# What llama.cpp takes for granted where such a file says nothing; early Mixtral files leave some of it out.
_DEFAULTS: Mapping[str, Json] = {
    f"{_PREFIX}.add_bos_token": True,
    f"{_PREFIX}.add_space_prefix": True,
    f"{_PREFIX}.bos_token_id": 1,
    f"{_PREFIX}.eos_token_id": 2,
    f"{_PREFIX}.unknown_token_id": 0,
}

Pair = tuple[str, str]


def with_defaults(metadata: Mapping[str, Json]) -> dict[str, Json]:
    """The settings, those an SPM file may leave out filled in."""
    given = {key: value for key, value in metadata.items() if value is not None}
    return {**(_DEFAULTS if metadata.get(f"{_PREFIX}.model") == "llama" else {}), **given}


def spm_tokenizer(path: Path, metadata: Mapping[str, Json]) -> Tokenizer:
    """The tokenizer of a file's settings, which `with_defaults` has been applied to. Raises ConvertError."""
    _refuse_normalisation(path, metadata)
    tokens = strings(path, metadata, f"{_PREFIX}.tokens")
    scores = _numbers(path, metadata, f"{_PREFIX}.scores", len(tokens))
    kinds = _numbers(path, metadata, f"{_PREFIX}.token_type", len(tokens))
    # User-defined tokens are looked for in the text as it is. Files made before 2024 have them with SentencePiece's sign for a space.
    tokens = [token.replace(_SPACE, " ") if kind == USER_DEFINED else token for token, kind in zip(tokens, kinds, strict=True)]
    vocab = ids_of(path, tokens)
    pieces = {tokens[index]: scores[index] for index in _of_kind(kinds, NORMAL, UNUSED)}
    _refuse_lost_pieces(path, pieces, vocab)
    merges, unknown = _merges(path, pieces), _unknown(path, metadata, tokens)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in kinds))
    prefix = metadata.get(f"{_PREFIX}.add_space_prefix") is True
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE)] * prefix + [normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] * prefix
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    add_marked(tokenizer, tokens, special=_of_kind(kinds, UNKNOWN, CONTROL), plain=_of_kind(kinds, USER_DEFINED))
    add_bos(tokenizer, tokens, metadata)
    return tokenizer


def _refuse_normalisation(path: Path, metadata: Mapping[str, Json]) -> None:
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.get(f"{_PREFIX}.{key}"):
            raise ConvertError(f"{path}: {_PREFIX}.{key} is set, which cannot be rebuilt here. {REMEDY}")


def _numbers(path: Path, metadata: Mapping[str, Json], key: str, count: int) -> list[float]:
    value = metadata.get(key)
    if not isinstance(value, list) or len(value) != count:
        raise ConvertError(f"{path}: {key} is missing or has not one entry for each of the {count} tokens. {REMEDY}")
    numbers = [float(item) for item in value if isinstance(item, int | float) and math.isfinite(item)]
    if len(numbers) != count:
        raise ConvertError(f"{path}: {key} has entries that are no finite numbers. {REMEDY}")
    return numbers


def _of_kind(kinds: Sequence[float], *wanted: int) -> list[int]:
    return [index for index, kind in enumerate(kinds) if kind in wanted]


def _unknown(path: Path, metadata: Mapping[str, Json], tokens: Sequence[str]) -> str:
    index = metadata.get(f"{_PREFIX}.unknown_token_id")
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise ConvertError(f"{path}: {_PREFIX}.unknown_token_id is {index!r}, the file has {len(tokens)} tokens. {REMEDY}")
    return tokens[index]


def _merges(path: Path, scores: Mapping[str, float]) -> list[Pair]:
    """Every pair of pieces whose concatenation is a piece, in the order they are joined."""
    merges = [pair for piece in scores for pair in _splits(piece) if pair[0] in scores and pair[1] in scores]
    merges.sort(key=lambda pair: -scores["".join(pair)])  # stable: among the splits of one piece any order will do
    _refuse_ties(path, merges, scores)
    return merges


def _splits(piece: str) -> Iterator[Pair]:
    return ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))


def _refuse_lost_pieces(path: Path, pieces: Iterable[str], vocab: Mapping[str, int]) -> None:
    """Raises if a piece is joined from a character that is no token: the library would already have made bytes of that."""
    for piece in pieces:
        for pair in _splits(piece):
            lost = [part for part in pair if part not in vocab]
            if lost and all(len(part) == 1 for part in lost):
                raise ConvertError(f"{path}: the token {piece!r} is there, its character {lost[0]!r} is not. {REMEDY}")


def _refuse_ties(path: Path, merges: Iterable[Pair], scores: Mapping[str, float]) -> None:
    """Raises if two pieces of one score can compete, for a list cannot say "the leftmost of them": they share the symbol between them,
    or joining one makes a part of a piece that is better than either."""
    merges = list(merges)
    by_score: dict[float, set[str]] = {}
    starts: dict[tuple[float, str], set[str]] = {}
    for left, right in merges:
        piece = left + right
        by_score.setdefault(scores[piece], set()).add(piece)
        starts.setdefault((scores[piece], left), set()).add(piece)
    tied = {piece for pieces in by_score.values() if len(pieces) > 1 for piece in pieces}
    for left, right in merges:
        piece = left + right
        rivals = starts.get((scores[piece], right), set()) - {piece}
        for part in (left, right):
            if part in tied and scores[piece] > scores[part]:
                piece, rivals = part, by_score[scores[part]] - {part}
        if rivals:
            raise ConvertError(
                f"{path}: the tokens {piece!r} and {min(rivals)!r} have the same score, and a tokenizer.json cannot say that "
                f"the leftmost is joined first. {REMEDY}"
            )
