"""The peers' output and files. samples/ holds what their programs printed."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from ops.bench.measure import BenchError
from ops.bench.peers.compare import Board
from ops.bench.peers.gguf_model import FIRST_WORD, tensors, write_gguf
from ops.bench.peers.output import Answered, check_answers, distinct_words, read_completions, read_llama_bench, streams_rate
from ops.random_model import ModelShape

SAMPLES = Path(__file__).parent / "samples"
SHAPE = ModelShape(layers=2, hidden=64, heads=2, kv_heads=1, ffn=96, experts=4, top_k=2, vocab=512, qk_norm=True)


def test_llama_bench_tells_prompts_from_generation() -> None:
    prompt, generation = read_llama_bench((SAMPLES / "llama-bench.json").read_text())
    assert (prompt.prompt, prompt.generated, prompt.depth) == (32, 0, 0)
    assert prompt.tokens_per_second == (31259.5,)
    assert (generation.prompt, generation.generated, generation.depth) == (0, 8, 0)
    assert generation.tokens_per_second == (13744.5,)


def test_depth_is_read_from_either_engine() -> None:
    theirs = {"n_prompt": 0, "n_gen": 8, "n_depth": 64, "samples_ts": [5.0]}
    ik = {"n_prompt": 64, "n_gen": 8, "test": "tg8@pp64", "samples_ts": [4.0]}
    text = f"loading\n{json.dumps([theirs, ik], indent=1)}\nbye"
    assert [(line.prompt, line.generated, line.depth) for line in read_llama_bench(text)] == [(0, 8, 64), (0, 8, 64)]


@pytest.mark.parametrize("text", ["", "error: no such model", "[\n]", "[\n{}\n]"])
def test_other_output_of_llama_bench_is_an_error(text: str) -> None:
    with pytest.raises(BenchError, match="llama-bench"):
        read_llama_bench(text)


def test_answers_without_timings_are_an_error() -> None:
    with pytest.raises(BenchError, match="without timings"):
        read_completions(b'{"error": {"message": "busy"}}')


def answered(tokens: int, seconds: float, *, prompt: int = 8) -> Answered:
    return Answered(prompt, tokens, seconds, 0.5, "")


def test_the_median_stream_counts_for_all() -> None:
    assert streams_rate([answered(65, 9.0), answered(65, 2.0), answered(65, 2.0), answered(65, 2.0)]) == 4 * 32.0


def test_answers_that_are_short_or_of_a_kept_prompt_or_one_after_the_other_are_errors() -> None:
    side_by_side = [answered(64, 2.0), answered(64, 2.2)]
    check_answers(side_by_side, streams=2, prompt=8, answer=64, seconds=2.8)
    with pytest.raises(BenchError, match="answered 2 of 3 prompts"):
        check_answers(side_by_side, streams=3, prompt=8, answer=64, seconds=2.8)
    with pytest.raises(BenchError, match="generated 63 tokens of 64"):
        check_answers([*side_by_side, answered(63, 2.0)], streams=3, prompt=8, answer=64, seconds=2.8)
    with pytest.raises(BenchError, match="computed 1 tokens of a prompt of 8"):
        check_answers([*side_by_side, answered(64, 2.0, prompt=1)], streams=3, prompt=8, answer=64, seconds=2.8)
    with pytest.raises(BenchError, match="ran for only 50% of the time each"):
        check_answers(side_by_side, streams=2, prompt=8, answer=64, seconds=5.2)


def test_completions_of_one_prompt_or_several_are_read() -> None:
    timings = {"prompt_n": 64, "prompt_ms": 250.0, "predicted_n": 2, "predicted_ms": 500.0}
    one = {"content": " w1 w2", "timings": timings}
    expected = Answered(64, 2, 0.5, 0.25, " w1 w2")
    assert read_completions(json.dumps(one).encode()) == [expected]
    assert read_completions(json.dumps([one, one]).encode()) == [expected, expected]


def test_streams_that_say_the_same_are_not_distinct() -> None:
    assert distinct_words(["a b c", "d e f"]) == 1.0
    assert distinct_words(["a b", "a c"]) == 0.75
    assert distinct_words(["", ""]) == 1.0


def test_ratios_are_of_medians_and_against_the_best_peer() -> None:
    board = Board()
    for ours, slow, fast in ((100.0, 10.0, 50.0), (120.0, 20.0, 40.0), (80.0, 15.0, 60.0)):
        board.add("decode", "colibri", ours, {"streams": 1})
        board.add("decode", "slow", slow)
        board.add("decode", "fast", fast)
    board.add("prefill", "colibri", 7.0)
    mine, slow_row, fast_row, alone = board.rows()
    assert mine.samples == (100.0, 120.0, 80.0)
    assert mine.details == {"streams": 1.0, "x best peer": 2.0}
    assert slow_row.details["colibri x"] == pytest.approx(100 / 15)
    assert fast_row.details["colibri x"] == 2.0
    assert alone.details == {}


def test_the_gguf_file_has_every_tensor_and_a_vocabulary(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    write_gguf(out, SHAPE)
    reader = gguf.GGUFReader(out)
    found = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    assert found == {spec.name: spec.shape for spec in tensors(SHAPE)}
    assert str(reader.fields["general.architecture"].contents()) == "qwen3moe"
    words = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(words) == len(set(words)) == SHAPE.vocab
    assert words[FIRST_WORD] == "▁w0"
    down = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_down_exps.weight")
    assert float(np.asarray(down.data, np.float32).std()) == pytest.approx(2 / np.sqrt(4) / np.sqrt(96), rel=0.05)
    assert not list(tmp_path.glob("*.part"))
