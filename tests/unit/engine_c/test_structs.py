"""The Python values mirror colibri.h."""

from __future__ import annotations

import pickle

import pytest

from engine_c import FORMATS, KV_BLOCK, KV_FORMATS, MAX_TOP_LOGPROBS, EngineError, ModelInfo, Sampling, SessionOptions, StepStats
from engine_c._engine import ffi, lib
from engine_c.basics import STATUS_NAMES

ENUM = ffi.typeof("enum colibri_status")


def fields(struct: str) -> list[str]:
    return [name for name, _ in ffi.typeof(struct).fields if name != "reserved"]


@pytest.mark.parametrize(
    ("struct", "ours"),
    [
        ("colibri_model_info", ModelInfo),
        ("colibri_session_options", SessionOptions),
        ("colibri_sampling", Sampling),
        ("colibri_step_stats", StepStats),
    ],
)
def test_fields_are_those_of_the_header_in_its_order(struct: str, ours: type) -> None:
    assert list(ours.__slots__) == fields(struct)


def test_tuples_fill_the_structs_in_the_headers_order() -> None:
    options = SessionOptions(1, 2, 3, 4, 1, 6, 0, 8, 9, 1)
    struct = ffi.new("colibri_session_options *", options.as_tuple())
    assert [getattr(struct, name) for name in SessionOptions.__slots__] == [getattr(options, name) for name in SessionOptions.__slots__]
    sampling = Sampling(0.5, 0.25, 0.125, 1.5, 7, 3, 2**64 - 1)
    struct = ffi.new("colibri_sampling *", sampling.as_tuple())
    assert [getattr(struct, name) for name in Sampling.__slots__] == [getattr(sampling, name) for name in Sampling.__slots__]


def test_constants_are_the_headers() -> None:
    assert (KV_BLOCK, MAX_TOP_LOGPROBS) == (lib.COLIBRI_KV_BLOCK, lib.COLIBRI_MAX_TOP_LOGPROBS)
    assert {name: getattr(lib, f"COLIBRI_{name.upper()}") for name in FORMATS} == FORMATS
    assert {name: getattr(lib, f"COLIBRI_KV_{name.upper()}") for name in KV_FORMATS} == KV_FORMATS
    assert {value: name.removeprefix("COLIBRI_") for value, name in ENUM.elements.items()} == STATUS_NAMES


def test_errors_have_code_name_and_sentence_and_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(EngineError(-3, "the file is not a container")))
    assert (error.code, error.name, str(error)) == (-3, "EFORMAT", "the file is not a container")
