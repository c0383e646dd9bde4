"""Detokenising against the tokenizers library, and its streaming form against its own whole form."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer as HfTokenizer, decoders, models, pre_tokenizers

from service.detokenise import Detokeniser, UnsupportedDecoder, read_rules
from service.tokenizer import Tokenizer


def byte_level() -> HfTokenizer:
    """All byte symbols, a few merges' worth of longer pieces that end inside a character, added tokens special and plain."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    stand_in = {byte: char for char, byte in _table().items()}
    longer = ["".join(stand_in[b] for b in raw) for raw in (b"\xf0\x9f", b"\x98\x80", b" the", b"\xe4\xb8\xad", b"a\xc3", b"\xa9b")]
    tokenizer = HfTokenizer(models.BPE(vocab={piece: i for i, piece in enumerate([*symbols, *longer])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    tokenizer.add_tokens([AddedToken("two words", normalized=False)])
    return tokenizer


def _table() -> dict[str, int]:
    from service.detokenise import byte_level_table

    return byte_level_table()


def byte_fallback() -> HfTokenizer:
    """As SentencePiece models are converted: ▁ for spaces, <0xNN> for bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁the", "a", "é", "中", "▁▁", "b"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = HfTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
OURS_LEVEL, OURS_FALLBACK = Tokenizer(BYTE_LEVEL.to_str().encode()), Tokenizer(BYTE_FALLBACK.to_str().encode())
level_ids = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40)
fallback_ids = st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=40)


def streamed(detokeniser: Detokeniser, ids: Sequence[int]) -> list[str]:
    return [*(detokeniser.feed(i) for i in ids), detokeniser.flush()]


@given(level_ids, st.booleans())
def test_byte_level_decode_equals_the_librarys(ids: list[int], skip: bool) -> None:
    assert OURS_LEVEL.decode(ids, skip_special=skip) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=30))
def test_byte_fallback_decode_equals_the_librarys_on_whole_characters(text: str) -> None:
    ids = [BYTE_FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in text.encode("utf-8", "ignore")]
    assert OURS_FALLBACK.decode(ids) == BYTE_FALLBACK.decode(ids)


@given(st.lists(st.sampled_from(["▁", "▁the", "a", "é", "中", "▁▁", "b", "<s>"]), max_size=20))
def test_pieces_and_leading_space_decode_as_the_librarys(pieces: list[str]) -> None:
    ids = [BYTE_FALLBACK.token_to_id(piece) for piece in pieces]
    assert OURS_FALLBACK.decode(ids) == BYTE_FALLBACK.decode(ids)


@given(level_ids)
def test_byte_level_deltas_add_up(ids: list[int]) -> None:
    parts = streamed(Detokeniser(OURS_LEVEL.bytes_of), ids)
    assert "".join(parts) == OURS_LEVEL.decode(ids)


@given(fallback_ids)
def test_byte_fallback_deltas_add_up(ids: list[int]) -> None:
    assert "".join(streamed(Detokeniser(OURS_FALLBACK.bytes_of), ids)) == OURS_FALLBACK.decode(ids)


@given(st.text(min_size=1, max_size=20))
def test_every_delta_of_valid_text_is_whole_characters(text: str) -> None:
    raw = text.encode("utf-8", "ignore")
    symbols = {byte: char for char, byte in _table().items()}
    ids = [BYTE_LEVEL.token_to_id(symbols[byte]) for byte in raw]
    parts = streamed(Detokeniser(OURS_LEVEL.bytes_of), ids)
    assert "".join(parts) == raw.decode()
    assert parts[-1] == ""
    assert sum(1 for part in parts if part) == len(raw.decode())


def test_an_answer_that_continues_a_prompt_keeps_its_leading_space() -> None:
    the = BYTE_FALLBACK.token_to_id("▁the")
    assert OURS_FALLBACK.continuation().feed(the) == " the"
    assert OURS_FALLBACK.decode([the]) == "the"


def test_ids_beyond_the_tokenizer_decode_to_nothing() -> None:
    assert OURS_LEVEL.decode([10_000_000]) == ""


def test_without_a_decoder_pieces_are_joined_by_spaces() -> None:
    tokenizer = HfTokenizer(models.WordLevel({"hello": 0, "world": 1}, unk_token="hello"))
    ours = Tokenizer(tokenizer.to_str().encode())
    assert ours.decode([0, 1, 0]) == tokenizer.decode([0, 1, 0]) == "hello world hello"


@pytest.mark.parametrize(
    "decoder",
    [{"type": "WordPiece"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}, {"type": "Replace", "pattern": {"Regex": "a"}}, 7],
)
def test_unknown_decoders_are_refused_by_name(decoder: object) -> None:
    with pytest.raises(UnsupportedDecoder, match="decoder"):
        read_rules(json.loads(json.dumps(decoder)))
