"""SentencePiece models for tests: trained on this project's own texts or put together by hand, and written as GGUF files have them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as model_pb2

ROOT = Path(__file__).parents[3]
_FOREIGN = "Grüße aus Köln, déjà vu, naïve café. Привет, мир. 你好世界 こんにちは. 12345 + 67890 = 80235; x = [1, 2, 3]"

Processor = sentencepiece.SentencePieceProcessor


def train(*, vocab_size: int = 700, **options: Any) -> Processor:
    """A BPE model made with the options of Llama's and Mixtral's: bytes for the unknown, single digits, every space kept."""
    lines = [line for name in ("architecture.md", "operations.md") for line in (ROOT / "docs" / name).read_text().splitlines() if line]
    lines += [path_line for path_line in (ROOT / "ops" / "container.py").read_text().splitlines() if path_line] + [_FOREIGN] * 3
    written = io.BytesIO()
    settings = {
        "model_type": "bpe",
        "vocab_size": vocab_size,
        "byte_fallback": True,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "character_coverage": 0.999,
        "num_threads": 1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.Train(sentence_iterator=iter(lines), model_writer=written, **settings | options)
    return Processor(model_proto=written.getvalue())


def by_hand(pieces: Iterable[tuple[str, float, int]]) -> Processor:
    """A model of (piece, score, kind), kinds as GGUF's, which are SentencePiece's own; no bytes, no space before a text."""
    proto = model_pb2.ModelProto()
    proto.trainer_spec.model_type = model_pb2.TrainerSpec.BPE
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    for piece, score, kind in pieces:
        proto.pieces.add(piece=piece, score=score, type=kind)
    return Processor(model_proto=proto.SerializeToString())


def kinds(model: Processor) -> list[int]:
    """tokenizer.ggml.token_type."""
    proto = model_pb2.ModelProto.FromString(model.serialized_model_proto())
    return [int(piece.type) for piece in proto.pieces]


def settings(model: Processor, **changes: object) -> dict[str, Any]:
    """The settings llama.cpp's converter writes for a model, without the prefix "tokenizer.ggml."; `changes` of None leave one out."""
    ids: Sequence[int] = range(model.GetPieceSize())
    spec = model_pb2.ModelProto.FromString(model.serialized_model_proto()).normalizer_spec
    values: dict[str, object] = {
        "model": "llama",
        "tokens": [model.IdToPiece(index) for index in ids],
        "scores": [model.GetScore(index) for index in ids],
        "token_type": kinds(model),
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
        "add_bos_token": True,
        "add_space_prefix": spec.add_dummy_prefix,
    }
    return {key: value for key, value in (values | changes).items() if value is not None}


def write_settings(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    """Through the library's own calls, which choose the types."""
    calls = {
        "model": writer.add_tokenizer_model,
        "tokens": writer.add_token_list,
        "scores": writer.add_token_scores,
        "token_type": writer.add_token_types,
        "bos_token_id": writer.add_bos_token_id,
        "eos_token_id": writer.add_eos_token_id,
        "unknown_token_id": writer.add_unk_token_id,
        "add_bos_token": writer.add_add_bos_token,
        "add_space_prefix": writer.add_add_space_prefix,
        "chat_template": writer.add_chat_template,
    }
    for key, value in values.items():
        calls[key](value)
