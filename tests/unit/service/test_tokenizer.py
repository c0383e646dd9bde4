"""Encoding, and tokenizer files that are no good."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer as HfTokenizer, decoders, models, pre_tokenizers

from ops.random_model import random_tokenizer
from service.tokenizer import Tokenizer, TokenizerError

FULL = Tokenizer(random_tokenizer(300).encode())


def without(missing: str) -> Tokenizer:
    """A byte-level tokenizer that lacks some byte symbols, as real ones do."""
    symbols = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(missing))
    tokenizer = HfTokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Tokenizer(tokenizer.to_str().encode())


@given(st.text(max_size=50).filter(lambda text: "<|" not in text))  # special tokens, which decoding leaves out
def test_text_survives_the_round_trip(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert FULL.decode(FULL.encode(text)) == text


def test_bytes_missing_from_the_vocabulary_are_left_out_without_a_crash() -> None:
    tokenizer = without("xÃ")  # x, and the first byte of é
    assert tokenizer.decode(tokenizer.encode("axb")) == "ab"
    assert tokenizer.decode(tokenizer.encode("aéb"), skip_special=False).strip("\ufffd") in ("ab", "a\ufffdb")


def test_special_tokens_are_read_from_text_and_left_out_of_it() -> None:
    ids = FULL.encode("<|im_start|>user")
    assert len(ids) == 5
    assert FULL.decode(ids) == "user"
    assert FULL.decode(ids, skip_special=False) == "<|im_start|>user"


@pytest.mark.parametrize("blob", [b"", b"{}", b"not json", b"\xff\xfe", b'{"decoder": {"type": "Odd"}}'])
def test_a_broken_tokenizer_file_gives_one_clear_error(blob: bytes) -> None:
    with pytest.raises(TokenizerError, match="tokenizer"):
        Tokenizer(blob)
