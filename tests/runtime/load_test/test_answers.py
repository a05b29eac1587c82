"""Times and counts of an answer, however its bytes are cut and whichever server wrote it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from inferencex.runtime.load_test.answers import Answer, StreamedAnswer, WholeAnswer, error_message
from inferencex.runtime.load_test.records import RequestRecord
from tests.runtime.load_test.fake_server import event, token, usage


def read(answer: Answer, pieces: Sequence[bytes], status: int = 200) -> RequestRecord:
    """Let the pieces arrive at 0, 1, 2, ... seconds."""
    answer.begin(status)
    for now, piece in enumerate(pieces):
        answer.body(piece, float(now))
    answer.finish()
    return answer.record


def streamed(*events: str, max_tokens: int = 99) -> RequestRecord:
    return read(StreamedAnswer(RequestRecord(0), max_tokens), [event(data) for data in events])


def test_a_stream_of_completions() -> None:
    record = streamed(token("a"), token("b"), token("c"), token("", "stop"), usage(7, 3), "[DONE]")
    assert [*record.arrivals] == [0, 1, 2]
    assert (record.prompt_tokens, record.output_tokens, record.finish_reason, record.error) == (7, 3, "stop", None)


def test_a_stream_of_a_chat_begins_with_its_text() -> None:
    role = json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    end = json.dumps({"choices": [{"delta": {}, "finish_reason": "length"}]})
    record = streamed(role, token("a", chat=True), token("b", chat=True), end, "[DONE]", max_tokens=2)
    assert [*record.arrivals] == [1, 2]
    assert record.output_tokens == 2


@pytest.mark.parametrize("delta", [{"reasoning_content": "x"}, {"tool_calls": [{"index": 0}]}, {"refusal": "no"}])
def test_what_a_chat_streams_beside_content_is_text_too(delta: dict[str, object]) -> None:
    record = streamed(json.dumps({"choices": [{"delta": delta, "finish_reason": None}]}), "[DONE]")
    assert len(record.arrivals) == 1


def test_the_last_text_may_come_with_the_reason_of_the_end() -> None:
    record = streamed(token("a"), token("b", "length"), "[DONE]", max_tokens=5)
    assert [*record.arrivals] == [0, 1]
    assert record.output_tokens == 5, "it ended because there were as many as asked for, in whatever events"


def test_tokens_without_text_yet_are_tokens() -> None:
    unfinished = json.dumps({"choices": [{"text": "", "finish_reason": None}]})
    record = streamed(unfinished, token("é"), token("", "stop"), "[DONE]")
    assert [*record.arrivals] == [0, 1]


def test_usage_in_every_event_counts_once_and_last() -> None:
    def with_usage(text: str, count: int) -> str:
        return json.dumps({"choices": [{"text": text}], "usage": {"prompt_tokens": 3, "completion_tokens": count}})

    assert streamed(*(with_usage("a", count) for count in range(1, 9)), "[DONE]").output_tokens == 8


def test_events_that_arrive_together_have_one_time() -> None:
    pieces = [event(token("a")), event(token("b")) + event(token("c")), event("[DONE]")]
    record = read(StreamedAnswer(RequestRecord(0), 9), pieces)
    assert record.inter_token_latencies == [1.0, 0.0]


def test_a_stream_cut_at_any_byte_is_the_same() -> None:
    stream = b"".join(map(event, (token("a"), token("é"), token("", "stop"), usage(4, 2), "[DONE]")))
    for place in range(len(stream) + 1):
        record = read(StreamedAnswer(RequestRecord(0), 9), [stream[:place], stream[place:]])
        assert (len(record.arrivals), record.output_tokens, record.prompt_tokens, record.error) == (2, 2, 4, None)


def test_a_stream_that_breaks_off_is_incomplete() -> None:
    assert streamed(token("a"), token("b")).error == "incomplete"
    assert streamed().error == "incomplete"
    assert streamed(token("a", "stop")).error is None, "not every server says [DONE]"


@pytest.mark.parametrize("body", ['{"error": {"message": "it broke"}}', '{"object":"error","message":"it broke"}'])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_an_error_within_a_stream(body: str, before: int) -> None:
    record = streamed(*[token("a")] * before, body, "[DONE]")
    assert (record.error, record.message) == ("stream", "it broke")


def test_a_stream_of_something_else_is_an_error() -> None:
    assert streamed("nonsense").error == "protocol"
    assert streamed(token("a"), "[1, 2]", "[DONE]").error == "protocol"


def test_a_refusal_is_an_error_by_its_status() -> None:
    body = b'{"error": {"message": "too many"}}'
    for answer in (StreamedAnswer(RequestRecord(0), 9), WholeAnswer(RequestRecord(0), 9)):
        record = read(answer, [body[:9], body[9:]], status=429)
        assert (record.error, record.message) == ("http 429", "too many")


def test_a_whole_answer() -> None:
    body = {"choices": [{"text": "ab", "finish_reason": "length"}], "usage": {"completion_tokens": 2}}
    record = read(WholeAnswer(RequestRecord(0, prompt_tokens=5), 2), [json.dumps(body).encode()])
    assert (record.prompt_tokens, record.output_tokens, record.error) == (5, 2, None)
    assert record.time_to_first_token is None and record.time_per_output_token is None
    assert read(WholeAnswer(RequestRecord(0), 2), [b"{}"]).error == "protocol"


def test_a_whole_answer_that_nobody_counted() -> None:
    ended = [b'{"choices": [{"text": "ab", "finish_reason": "%s"}]}' % reason for reason in (b"length", b"stop")]
    assert [read(WholeAnswer(RequestRecord(0), 7), [body]).output_tokens for body in ended] == [7, None]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"detail": "gone"}', "gone"),
        (b'{"error": "plain"}', "plain"),
        (b"Bad Gateway\n", "Bad Gateway"),
        (b"", None),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_messages_of_errors_of_several_servers(body: bytes, message: str | None) -> None:
    assert error_message(body) == message
