"""Answers over gRPC: what is streamed is what was asked for, whole, reproducible and independent of what else runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from colibri.v1 import inference_pb2 as pb
from service.client import Completion, generate_request
from tests.integration.serving import PATIENCE, Serving, serving, until

PROMPTS = ["Hello", "The quick brown fox jumps over the lazy dog. " * 3, "é 中 😀", "a", "1 2 3 4 5 6 7 8 9 10 11 12"]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Serving]:
    with serving(tiny_model, max_rows=48, max_seqs=16) as running:
        yield running


def same(a: Completion, b: Completion) -> bool:
    return (a.text, a.token_ids, a.finish.reason, a.finish.WhichOneof("matched")) == (
        b.text,
        b.token_ids,
        b.finish.reason,
        b.finish.WhichOneof("matched"),
    )


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("ending", [{}, {"ignore_eos": True}, {"stop": ["be", " k"]}, {"temperature": 0.0}])
def test_streamed_deltas_add_up_to_the_answer_in_one_piece(server: Serving, prompt: str, ending: dict[str, object]) -> None:
    streamed = server.client.complete(generate_request(prompt, max_tokens=60, seed=3, **ending))
    whole = server.client.complete(generate_request(prompt, max_tokens=60, seed=3, stream=False, **ending))
    assert same(streamed, whole)
    assert streamed.text or streamed.token_ids


def test_there_is_exactly_one_finish_and_it_comes_last(server: Serving) -> None:
    events = list(server.client.generate(generate_request("Hello", max_tokens=20, seed=1, ignore_eos=True)))
    assert [isinstance(event, pb.Finish) for event in events].count(True) == 1
    finish = events[-1]
    assert isinstance(finish, pb.Finish)
    assert finish.reason == pb.FINISH_REASON_LENGTH
    assert finish.usage.completion_tokens == sum(len(event.token_ids) for event in events[:-1]) == 20
    assert finish.usage.prompt_tokens == 5
    assert finish.seed == 1


def test_tokens_are_held_as_long_as_the_request_allows_and_none_is_lost(server: Serving) -> None:
    def deltas(interval_ms: int | None, seen: Callable[[], object] = lambda: None) -> list[pb.Delta]:
        request = generate_request("Hello", max_tokens=40, seed=1, ignore_eos=True)
        if interval_ms is not None:
            request.stream_interval_ms = interval_ms
        found = []
        for event in server.client.generate(request):
            seen()
            if isinstance(event, pb.Delta):
                found.append(event)
        return found

    def wait_for_the_first(step: int) -> Exception | None:
        return AssertionError("the first token waits") if step == third and not arrived.wait(PATIENCE) else None

    at_once, default = deltas(0), deltas(None)
    # The news of the first token leave as the second step begins; the third waits for the client to have them.
    third, arrived, began = server.gate.entered + 3, threading.Event(), time.monotonic()
    server.gate.fault = wait_for_the_first
    try:
        held = deltas(1000, arrived.set)
    finally:
        server.gate.fault = lambda _: None
    seconds = time.monotonic() - began
    whole = "".join(delta.text for delta in at_once), [token for delta in at_once for token in delta.token_ids]
    for other in (held, default):
        assert ("".join(delta.text for delta in other), [token for delta in other for token in delta.token_ids]) == whole
    assert len(held[0].token_ids) == 1
    assert len(held) <= 2 + seconds


def test_in_one_piece_there_is_one_delta(server: Serving) -> None:
    events = list(server.client.generate(generate_request("Hello", max_tokens=20, seed=1, stream=False)))
    assert [type(event) for event in events] == [pb.Delta, pb.Finish]


def test_a_stop_string_across_tokens_ends_the_answer_before_it(server: Serving) -> None:
    whole = server.client.complete(generate_request("Hello", max_tokens=60, seed=3, ignore_eos=True))
    at = len(whole.text) // 2
    stop = whole.text[at - 4 : at + 4]
    for stream in (True, False):
        request = generate_request("Hello", max_tokens=60, seed=3, ignore_eos=True, stop=["never seen", stop], stream=stream)
        cut = server.client.complete(request)
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert (cut.finish.reason, cut.finish.stop_string) == (pb.FINISH_REASON_STOP, stop)
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert cut.finish.usage.completion_tokens == len(cut.token_ids)


def test_a_stop_string_in_the_last_token_allowed_still_counts(server: Serving) -> None:
    whole = server.client.complete(generate_request("Hello", max_tokens=12, seed=7, ignore_eos=True))
    stop = whole.text[-2:]
    before = server.client.complete(generate_request("Hello", max_tokens=11, seed=7, ignore_eos=True))
    assert stop not in before.text
    for stream in (True, False):
        cut = server.client.complete(generate_request("Hello", max_tokens=12, seed=7, ignore_eos=True, stop=[stop], stream=stream))
        assert cut.text + stop == whole.text
        assert (cut.finish.reason, cut.finish.stop_string) == (pb.FINISH_REASON_STOP, stop)


def test_a_stop_token_ends_the_answer_and_is_named(server: Serving) -> None:
    whole = server.client.complete(generate_request("Hello", max_tokens=30, seed=3, ignore_eos=True))
    stop = whole.token_ids[10]
    cut = server.client.complete(generate_request("Hello", max_tokens=30, seed=3, ignore_eos=True, stop_token_ids=[stop]))
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert (cut.finish.reason, cut.finish.stop_token_id) == (pb.FINISH_REASON_STOP, stop)


def test_an_answer_without_a_seed_tells_the_one_that_repeats_it(server: Serving) -> None:
    first = server.client.complete(generate_request("Hello", max_tokens=40))
    again = server.client.complete(generate_request("Hello", max_tokens=40, seed=first.finish.seed))
    other = server.client.complete(generate_request("Hello", max_tokens=40))
    assert same(first, again)
    assert other.finish.seed != first.finish.seed


def test_sixteen_streams_at_once_each_equal_the_same_request_alone(server: Serving) -> None:
    prompts = [f"{i} " + PROMPTS[i % len(PROMPTS)] * (1 + i % 3) for i in range(16)]
    requests = [
        generate_request(prompt, max_tokens=50, seed=i, ignore_eos=True, temperature=0.0 if i % 4 == 0 else 1.2)
        for i, prompt in enumerate(prompts)
    ]
    alone = [server.client.complete(request) for request in requests]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(server.client.complete, requests))
    for a, b in zip(alone, together, strict=True):
        assert same(a, b)
    server.wait_idle()


def test_answers_survive_preemption_unchanged(tiny_model: Path, server: Serving) -> None:
    requests = [generate_request(f"{i} say", max_tokens=100, seed=i, ignore_eos=True) for i in range(8)]
    alone = [server.client.complete(request) for request in requests]
    with serving(tiny_model, max_rows=48, max_seqs=8, kv_memory=150_000) as tight, ThreadPoolExecutor(8) as pool:
        tight.gate.shut()
        answers = [pool.submit(tight.client.complete, request) for request in requests]
        until(lambda: len(tight.server.default.desk.streams) == len(requests), "all are accepted")
        tight.gate.open()
        for expected, answer in zip(alone, answers, strict=True):
            assert same(expected, answer.result())
        assert tight.stats().preemptions > 0
        tight.wait_idle()


def test_a_prompt_seen_before_is_taken_from_the_cache_and_changes_nothing(server: Serving) -> None:
    request = generate_request("Something not asked in any other test, long enough for blocks", max_tokens=20, seed=5)
    first, second = server.client.complete(request), server.client.complete(request)
    assert same(first, second)
    assert first.finish.usage.cached_tokens == 0
    assert second.finish.usage.cached_tokens == first.finish.usage.prompt_tokens // 16 * 16


def test_logprobs_come_with_each_token_most_likely_first(server: Serving) -> None:
    answer = server.client.complete(generate_request("Hello", max_tokens=10, temperature=0.0, top_logprobs=5, ignore_eos=True))
    assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
    for entry in answer.logprobs:
        assert entry.top[0].token_id == entry.token_id
        assert entry.top[0].logprob == entry.logprob <= 0
        assert sorted((top.logprob for top in entry.top), reverse=True) == [top.logprob for top in entry.top]
        assert len(entry.top) == 5
    assert b"".join(entry.bytes for entry in answer.logprobs).decode("utf-8", "replace") == answer.text


def test_a_score_gives_generated_tokens_the_logprobs_they_were_generated_with(server: Serving) -> None:
    prompt = server.client.tokenize("Hello there")
    answer = server.client.complete(generate_request(tokens=prompt, max_tokens=30, seed=2, top_logprobs=0, ignore_eos=True))
    score = server.client.score(tokens=[*prompt, *answer.token_ids], top_logprobs=2)
    assert [entry.token.token_id for entry in score.scores] == [*prompt[1:], *answer.token_ids]
    scored = [entry.token.logprob for entry in score.scores][-len(answer.token_ids) :]
    assert scored == [entry.logprob for entry in answer.logprobs]
    assert all((entry.rank == 0) == (entry.token.top[0].token_id == entry.token.token_id) for entry in score.scores)
    assert score.total_logprob == pytest.approx(sum(entry.token.logprob for entry in score.scores))


def test_text_tokens_and_chat_are_three_ways_to_the_same_prompt(server: Serving) -> None:
    messages = [("system", "Be brief."), ("user", "Hi")]
    rendered = server.client.tokenize_chat(messages)
    answers = [
        server.client.complete(generate_request(messages=messages, max_tokens=20, seed=1)),
        server.client.complete(generate_request(rendered.prompt, max_tokens=20, seed=1)),
        server.client.complete(generate_request(tokens=rendered.token_ids, max_tokens=20, seed=1)),
    ]
    assert same(answers[0], answers[1])
    assert same(answers[0], answers[2])
    assert rendered.prompt.endswith("assistant\n")


def test_tokens_go_to_text_and_back(server: Serving) -> None:
    text = "Grüße, 中文 😀!"
    assert server.client.detokenize(server.client.tokenize(text)) == text
    reply = server.client.stub.Tokenize(pb.TokenizeRequest(text=text))
    assert b"".join(reply.token_bytes).decode() == text


def test_the_model_describes_itself(server: Serving) -> None:
    model = server.client.model()
    assert server.client.models() == [model]
    assert server.client.model(model.name) == model
    assert (model.vocab_size, model.layers, model.experts, model.experts_per_token, model.quantisation) == (512, 3, 4, 2, "int8")
    assert model.has_tokenizer
    assert model.has_chat_template


def test_the_request_id_is_echoed_and_the_trailers_tell_where_time_went(server: Serving) -> None:
    call = server.client.stub.Generate(generate_request("Hello", max_tokens=5, seed=1), metadata=(("x-request-id", "abc-1"),))
    finish = list(call)[-1].finish
    assert dict(call.initial_metadata())["x-request-id"] == finish.request_id == "abc-1"
    trailers = dict(call.trailing_metadata())
    assert trailers["x-request-id"] == "abc-1"
    assert float(trailers["x-prefill-ms"]) == pytest.approx(finish.timings.prefill_ms, abs=0.001)
    assert float(trailers["x-queue-ms"]) >= 0
    assert float(trailers["x-decode-ms"]) >= 0


def test_a_request_id_is_made_up_if_there_is_none_or_it_is_not_fit_to_echo(server: Serving) -> None:
    given = [(), (("x-request-id", ""),), (("x-request-id", "x" * 129),)]
    calls = [server.client.stub.GetModel.with_call(pb.GetModelRequest(), metadata=metadata)[1] for metadata in given]
    made_up = [dict(call.initial_metadata())["x-request-id"] for call in calls]
    assert len(set(made_up)) == 3
    assert all(len(one) == 32 for one in made_up)
    _, call = server.client.stub.Score.with_call(pb.ScoreRequest(text="Hello"), metadata=(("x-request-id", "abc-2"),))
    assert dict(call.initial_metadata())["x-request-id"] == dict(call.trailing_metadata())["x-request-id"] == "abc-2"


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(tmp_path: Path) -> None:
    from ops.random_model import SHAPES, make_model

    path = tmp_path / "bare.colibri"
    make_model(path, replace(SHAPES["tiny"], tokenizer=False), quant="f32", seed=2)
    with serving(path) as bare:
        answer = bare.client.complete(generate_request(tokens=[1, 2, 3], max_tokens=8, seed=1, ignore_eos=True))
        assert answer.text == ""
        assert len(answer.token_ids) == 8
        assert not bare.client.model().has_tokenizer
