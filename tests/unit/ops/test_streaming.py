"""What is said of an answer that streamed in."""

from __future__ import annotations

from colibri.v1 import inference_pb2 as pb
from ops.commands.streaming import show_stream

LENGTH = pb.FINISH_REASON_LENGTH


def test_speed_is_the_server_s_even_if_all_of_an_answer_comes_at_once() -> None:
    usage, timings = pb.Usage(prompt_tokens=3, completion_tokens=11), pb.Timings(decode_ms=20)
    shown: list[str] = []
    events: list[pb.Delta | pb.Finish] = [
        pb.Delta(text="one "),
        pb.Delta(text="two"),
        pb.Finish(reason=LENGTH, usage=usage, timings=timings),
    ]
    streamed = show_stream(events, write=shown.append)
    assert (shown, streamed.text) == (["one ", "two"], "one two")
    assert streamed.summary().startswith("3 prompt tokens; 11 generated, length reached; first after ")
    assert streamed.summary().endswith("; 500.0 tokens/s")


def test_one_token_has_no_speed() -> None:
    streamed = show_stream([pb.Finish(reason=LENGTH, usage=pb.Usage(completion_tokens=1))], write=print)
    assert "tokens/s" not in streamed.summary()
