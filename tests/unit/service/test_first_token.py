"""The token every prompt of a model begins with (SentencePiece's <s>): there exactly once, whoever writes it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from colibri.v1 import inference_pb2 as pb
from engine_c import Model
from ops.convert import convert
from ops.convert.gguf_tokenizer import rebuild_tokenizer
from service.artifact import read_artifact
from service.served import ServedModel, load_texts, make_served
from tests.unit.ops import sentencepieces
from tests.unit.ops.checkpoints import Small, write_folder, write_gguf

BOS = 1
TEMPLATE = "[INST] {{ messages[0]['content'] }} [/INST]"
VOCABULARY = cache(sentencepieces.train)


def plain(text: str) -> list[int]:
    ids: list[int] = VOCABULARY().EncodeAsIds(text)
    return ids


def rebuilt(**changes: object) -> str:
    values = sentencepieces.settings(VOCABULARY(), **changes)
    return rebuild_tokenizer(Path("m.gguf"), {f"tokenizer.ggml.{key}": value for key, value in values.items()})


def served(path: Path) -> ServedModel:
    with Model.open(path) as model:
        artifact = read_artifact(path)
        return make_served(artifact, model.info, *load_texts(artifact), name="m", kv_tokens=256, default_max_tokens=16)


def from_gguf(tmp_path: Path, *, add_bos: bool = True, template: str = TEMPLATE, tokenizer: str = "auto") -> ServedModel:
    values = sentencepieces.settings(VOCABULARY(), add_bos_token=add_bos, chat_template=template)
    small = Small(vocab=VOCABULARY().GetPieceSize(), layers=1, experts=4)
    write_gguf(tmp_path / "m.gguf", small, add=lambda writer: sentencepieces.write_settings(writer, values))
    convert(tmp_path / "m.gguf", tmp_path / "m.colibri", tokenizer=tokenizer)
    return served(tmp_path / "m.colibri")


def text_tokens(model: ServedModel, text: str, *, add_special_tokens: bool = True) -> list[int]:
    return model.read_prompt(pb.TokenizeRequest(text=text), add_special_tokens=add_special_tokens).tokens


def chat_tokens(model: ServedModel, *, add_special_tokens: bool = True) -> list[int]:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="the")])
    return model.read_prompt(pb.TokenizeRequest(chat=chat), add_special_tokens=add_special_tokens).tokens


@pytest.mark.parametrize("text", ["the", "<s>the", "<s><s>the"])
def test_a_text_begins_with_it_once(tmp_path: Path, text: str) -> None:
    assert text_tokens(from_gguf(tmp_path), text) == [BOS, *plain("the")]


def test_a_text_without_special_tokens_is_left_alone(tmp_path: Path) -> None:
    model = from_gguf(tmp_path)
    assert text_tokens(model, "the", add_special_tokens=False) == plain("the")
    assert text_tokens(model, "<s>the", add_special_tokens=False) == [BOS, *plain("the")]


def test_an_empty_text_is_the_first_token_alone(tmp_path: Path) -> None:
    assert text_tokens(from_gguf(tmp_path), "") == [BOS]


@pytest.mark.parametrize("begin", ["", "{{ bos_token }}", "<s>"])
@pytest.mark.parametrize("special", [True, False])
def test_a_chat_begins_with_it_once_whether_or_not_the_template_writes_it(tmp_path: Path, begin: str, special: bool) -> None:
    model = from_gguf(tmp_path, template=begin + TEMPLATE)
    assert chat_tokens(model, add_special_tokens=special) == [BOS, *plain("[INST] the [/INST]")]


def test_a_model_without_one_gets_what_is_written(tmp_path: Path) -> None:
    model = from_gguf(tmp_path, add_bos=False)
    assert text_tokens(model, "the") == plain("the")
    assert text_tokens(model, "<s>the") == [BOS, *plain("the")]
    assert chat_tokens(model) == plain("[INST] the [/INST]")


@pytest.mark.parametrize("by_file", [True, False])
@pytest.mark.parametrize("by_tokenizer", [True, False])
def test_file_or_tokenizer_may_ask_for_it(tmp_path: Path, by_file: bool, by_tokenizer: bool) -> None:
    named = tmp_path / "tokenizer.json"
    named.write_text(rebuilt(add_bos_token=by_tokenizer))
    model = from_gguf(tmp_path, add_bos=by_file, tokenizer=str(named))
    wanted = [BOS] * (by_file or by_tokenizer)
    assert text_tokens(model, "the") == [*wanted, *plain("the")]
    assert chat_tokens(model) == [*wanted, *plain("[INST] the [/INST]")]


@pytest.mark.parametrize("by_tokenizer", [True, False])
def test_a_hugging_face_folder_may_say_it_beside_the_tokenizer(tmp_path: Path, by_tokenizer: bool) -> None:
    small = Small(vocab=VOCABULARY().GetPieceSize(), layers=1, experts=4, changes={"bos_token_id": BOS})
    source = write_folder(tmp_path / "src", small)
    (source / "tokenizer.json").write_text(rebuilt(add_bos_token=by_tokenizer))
    (source / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "chat_template": "{{ bos_token }}" + TEMPLATE}))
    convert(source, tmp_path / "m.colibri")
    model = served(tmp_path / "m.colibri")
    assert text_tokens(model, "the") == [BOS, *plain("the")]
    assert chat_tokens(model) == [BOS, *plain("[INST] the [/INST]")]
