"""SentencePiece vocabularies in GGUF files, against the sentencepiece library: the same ids for every text, and the text back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer as HfTokenizer

from ops.container import Container
from ops.convert import ConvertError, convert
from ops.convert.gguf_tokenizer import rebuild_tokenizer
from service.tokenizer import Tokenizer
from tests.unit.ops import sentencepieces
from tests.unit.ops.checkpoints import Small, write_gguf
from tests.unit.ops.failures import refused

BOS = 1
TEXTS = [
    "",
    " ",
    "   ",
    "a",
    " a",
    "  two  spaces   three ",
    "tab\tnewline\n\nreturn\r\n  indented\n\n\n",
    "The engine and the workers share one copy of the weights.",
    "    def open(cls, path: str) -> Container:\n        return cls(path)\n",
    "0 12 345 6789 3.14159 1e-5",
    "Grüße, déjà vu, Привет, 你好, こんにちは",
    "emoji 🙂🙂 👩‍👩‍👧 flags 🇨🇭",
    "unknown scripts ሰላም ᚠᛇᚻ ꙮ",
    "▁ literal ▁▁ signs",
    "zero\0byte and \x7f and \x80",
    "<0x41> is no byte, <unk is no token",
    "e\u0301 is not é; ﬁ and ½ and ｶ stay as they are",
    "a" * 300,
    " " * 67,
    "ab" * 123 + "c" * 77,
]
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
likely = st.lists(st.sampled_from([*"abcdehinorst", " ", "\n", "the", " the", "ing", "▁", "é", "🙂", "12", "  ", "_", "("]), max_size=60)


@cache
def trained(*, prefix: bool = True) -> sentencepieces.Processor:
    return sentencepieces.train(add_dummy_prefix=prefix)


def hf(model: sentencepieces.Processor, **changes: object) -> HfTokenizer:
    values = sentencepieces.settings(model, **changes)
    return HfTokenizer.from_str(rebuild_tokenizer(Path("m.gguf"), {f"tokenizer.ggml.{key}": value for key, value in values.items()}))


@cache
def rebuilt(*, prefix: bool = True) -> HfTokenizer:
    return hf(trained(prefix=prefix))


@cache
def ours(*, prefix: bool = True) -> Tokenizer:
    return Tokenizer(rebuilt(prefix=prefix).to_str().encode())


def check(text: str, *, prefix: bool) -> None:
    """Ids as SentencePiece has them, the text as it was: whole, and put together of what a stream says."""
    model, service = trained(prefix=prefix), ours(prefix=prefix)
    ids = model.EncodeAsIds(text)
    assert rebuilt(prefix=prefix).encode(text, add_special_tokens=False).ids == ids
    assert service.encode(text) == [BOS, *ids]
    assert rebuilt(prefix=prefix).decode([BOS, *ids]) == model.DecodeIds(ids) == text.replace("▁", " ")
    assert service.decode([BOS, *ids]) == text.replace("▁", " ")
    continued = service.continuation()
    deltas = [continued.feed(token) for token in ids] + [continued.flush()]
    assert "".join(deltas) == (" " if prefix and text else "") + text.replace("▁", " ")


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_the_ids_of_sentencepiece(text: str, prefix: bool) -> None:
    check(text, prefix=prefix)


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(texts, likely.map("".join)), prefix=st.booleans())
def test_any_text_has_the_ids_of_sentencepiece(text: str, prefix: bool) -> None:
    if not any(token in text for token in ("<unk>", "<s>", "</s>")):
        check(text, prefix=prefix)


def test_the_projects_own_files_have_the_ids_of_sentencepiece() -> None:
    for path in sorted((sentencepieces.ROOT / "service").glob("*.py")):
        check(path.read_text(), prefix=True)


def test_the_vocabulary_used_merges_digits_and_bytes() -> None:
    """Else the tests above would show little."""
    model = trained()
    assert sentencepieces.kinds(model).count(6) == 256
    assert len({piece for path in TEXTS for piece in model.EncodeAsPieces(path) if len(piece) > 2}) > 60
    assert [piece for piece in model.EncodeAsPieces("🙂") if piece.startswith("<0x")] == ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]


@given(ids=st.lists(st.integers(0, 699), max_size=40), prefix=st.booleans())
def test_deltas_of_any_tokens_add_up_to_the_whole(ids: list[int], prefix: bool) -> None:
    service = ours(prefix=prefix)
    continued = service.continuation()
    streamed = "".join([continued.feed(token) for token in ids]) + continued.flush()
    assert streamed.removeprefix(" " if prefix else "") == service.decode(ids)


# ---------------------------------------------------------------- vocabularies of any shape


def scored(pieces: Sequence[str], scores: Sequence[float]) -> sentencepieces.Processor:
    letters = [(letter, -1000.0 - index, 1) for index, letter in enumerate("abc")]
    return sentencepieces.by_hand([("<unk>", 0.0, 2), *((p, s, 1) for p, s in zip(pieces, scores, strict=True)), *letters])


@st.composite
def piece_sets(draw: st.DrawFn) -> list[str]:
    """Pieces put together of others, in any order: of one letter or several, with overlaps, in many ways."""
    letters = "abc"[: draw(st.integers(1, 3))]
    pieces = list(letters)
    for _ in range(draw(st.integers(1, 12))):
        piece = draw(st.sampled_from(pieces)) + draw(st.sampled_from(pieces))
        if len(piece) < 10 and piece not in pieces:
            pieces.append(piece)
    return list(draw(st.permutations([piece for piece in pieces if len(piece) > 1])))


@settings(max_examples=300, deadline=None)
@given(pieces=piece_sets(), seed=st.integers(0, 1 << 30))
def test_any_order_of_scores_joins_as_sentencepiece(pieces: list[str], seed: int) -> None:
    model = scored(pieces, [-float(index) for index in range(len(pieces))])
    tokenizer = hf(model, add_bos_token=False)
    rng = random.Random(seed)
    for _ in range(20):
        text = "".join(rng.choices("abcd", weights=[6, 4, 3, 1], k=rng.randint(1, 40)))
        assert tokenizer.encode(text).ids == model.EncodeAsIds(text)


@settings(max_examples=300, deadline=None)
@given(pieces=piece_sets(), seed=st.integers(0, 1 << 30))
def test_equal_scores_are_refused_or_join_as_sentencepiece(pieces: list[str], seed: int) -> None:
    rng = random.Random(seed)
    model = scored(pieces, [-float(rng.randint(0, len(pieces) // 2)) for _ in pieces])
    try:
        tokenizer = hf(model, add_bos_token=False)
    except ConvertError:
        return
    for _ in range(20):
        text = "".join(rng.choices("abcd", weights=[6, 4, 3, 1], k=rng.randint(1, 40)))
        assert tokenizer.encode(text).ids == model.EncodeAsIds(text)


def test_scores_and_not_positions_decide() -> None:
    assert hf(scored(["ab", "bc"], [-1.0, 0.0]), add_bos_token=False).encode("abc").tokens == ["a", "bc"]
    assert hf(scored(["ab", "bc"], [0.0, -1.0]), add_bos_token=False).encode("abc").tokens == ["ab", "c"]


def test_only_equal_scores_that_can_compete_are_refused() -> None:
    with pytest.raises(ConvertError, match=r"m\.gguf: the tokens 'ab' and 'bc' have the same score"):
        hf(scored(["ab", "bc"], [0.0, 0.0]))
    assert hf(scored(["ab", "cb"], [0.0, 0.0]), add_bos_token=False).encode("abcb").tokens == ["ab", "cb"]


# ---------------------------------------------------------------- kinds of tokens


@cache
def with_symbols(*, prefix: bool = True) -> sentencepieces.Processor:
    symbols = ["<|im_start|>", "<|im_end|>", "\n\n", "▁▁▁▁"]
    return sentencepieces.train(user_defined_symbols=symbols, control_symbols=["[INST]", "[/INST]"], add_dummy_prefix=prefix)


@cache
def symbols_without_prefix() -> HfTokenizer:
    return hf(with_symbols(prefix=False), add_bos_token=False)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "\n\n", "\n", "    ", " ", "user", "the", "🙂", "<|im_"]), max_size=12))
def test_user_defined_tokens_are_cut_out_as_sentencepiece_does(parts: list[str]) -> None:
    """Without the space prefix, which SentencePiece puts before the text only."""
    text = "".join(parts)
    assert symbols_without_prefix().encode(text).ids == with_symbols(prefix=False).EncodeAsIds(text)


def test_text_after_a_special_or_user_defined_token_begins_with_a_space_as_in_llama_cpp() -> None:
    model, tokenizer = with_symbols(), hf(with_symbols())
    the, end = model.PieceToId("▁the"), model.PieceToId("<|im_end|>")
    assert tokenizer.encode("the<|im_end|>the[INST]the</s>").ids == [BOS, the, end, the, model.PieceToId("[INST]"), the, 2]


def test_special_tokens_are_no_text_and_user_defined_ones_are() -> None:
    model = with_symbols()
    service = Tokenizer(hf(model).to_str().encode())
    ids = service.encode("[INST] a<|im_end|>\n\n    b</s>")
    assert service.decode(ids) == "  a<|im_end|>\n\n     b".removeprefix(" ")
    assert "[INST]" in service.decode(ids, skip_special=False)


def test_user_defined_spaces_are_found_however_the_file_writes_them() -> None:
    tokens = sentencepieces.settings(with_symbols())["tokens"]
    modern = [token.replace("▁", " ") if token == "▁▁▁▁" else token for token in tokens]
    assert hf(with_symbols()).to_str() == hf(with_symbols(), tokens=modern).to_str()
    assert tokens.index("▁▁▁▁") in hf(with_symbols()).encode("a    b").ids


def test_unknown_characters_without_byte_tokens_are_one_unknown_token() -> None:
    model = scored(["ab"], [0.0])
    tokenizer = hf(model, add_bos_token=False)
    for text in ("abéxab", "é", "aéc🙂🙂b"):
        assert tokenizer.encode(text).ids == model.EncodeAsIds(text)


# ---------------------------------------------------------------- whole files


def converted(tmp_path: Path, model: sentencepieces.Processor, **changes: Any) -> tuple[HfTokenizer, dict[str, Any]]:
    """The tokenizer and the generation settings of the container made of a GGUF file with this vocabulary."""
    values = sentencepieces.settings(model, **changes)
    small = Small(vocab=model.GetPieceSize(), layers=1, experts=4)
    write_gguf(tmp_path / "m.gguf", small, add=lambda writer: sentencepieces.write_settings(writer, values))
    assert convert(tmp_path / "m.gguf", tmp_path / "m.colibri").tokenizer
    with Container.open(tmp_path / "m.colibri") as container:
        return HfTokenizer.from_str(container.blob("tokenizer.json").decode()), container.descriptor["generation"]


def test_a_files_vocabulary_becomes_the_containers_tokenizer(tmp_path: Path) -> None:
    tokenizer, generation = converted(tmp_path, trained())
    assert tokenizer.to_str() == rebuilt().to_str()
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False).ids == trained().EncodeAsIds(text)
    assert (generation["bos_token_id"], generation["eos_token_ids"], generation["add_bos"]) == (1, [2], True)


def test_settings_that_early_files_leave_out_are_llamas(tmp_path: Path) -> None:
    left_out = dict.fromkeys(["add_bos_token", "add_space_prefix", "bos_token_id", "eos_token_id", "unknown_token_id"])
    tokenizer, generation = converted(tmp_path, trained(), **left_out)
    assert tokenizer.to_str() == rebuilt().to_str()
    assert (generation["bos_token_id"], generation["eos_token_ids"], generation["add_bos"]) == (1, [2], True)


def test_no_first_token_is_added_if_the_file_says_so(tmp_path: Path) -> None:
    tokenizer, generation = converted(tmp_path, trained(), add_bos_token=False)
    assert tokenizer.encode("the").ids == trained().EncodeAsIds("the")
    assert generation["add_bos"] is False


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["scores"].pop(), "scores is missing or has not one entry for each of the 700 tokens"),
        (lambda m: m.pop("scores"), "scores is missing"),
        (lambda m: m.pop("token_type"), "token_type is missing"),
        (lambda m: m["scores"].__setitem__(5, float("nan")), "scores has entries that are no finite numbers"),
        (lambda m: m["tokens"].__setitem__(5, m["tokens"][6]), "1 tokens twice"),
        (lambda m: m.update(unknown_token_id=700), "unknown_token_id is 700"),
        (lambda m: m.update(remove_extra_whitespaces=True), "remove_extra_whitespaces is set"),
        (lambda m: m["tokens"].__setitem__(m["tokens"].index("t"), "unheard"), "its character 't' is not"),
    ],
)
def test_faulty_vocabulary_is_named(change: Callable[[dict[str, Any]], object], says: str) -> None:
    values = sentencepieces.settings(trained())
    change(values)
    with pytest.raises(ConvertError, match=r"m\.gguf: .*--tokenizer none") as caught:
        rebuild_tokenizer(Path("m.gguf"), {f"tokenizer.ggml.{key}": value for key, value in values.items()})
    assert says in str(caught.value)


def test_a_vocabulary_that_cannot_be_rebuilt_leaves_no_file(tmp_path: Path) -> None:
    values = sentencepieces.settings(trained(), scores=[0.0] * 700)
    source = write_gguf(tmp_path / "m.gguf", Small(vocab=700), add=lambda writer: sentencepieces.write_settings(writer, values))
    assert "have the same score" in refused(source, tmp_path / "out.colibri")
