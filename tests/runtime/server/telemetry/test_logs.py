"""Log lines for machines and people, which nobody can forge and no secret is in."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from inferencex.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from inferencex.runtime.server.calls import RequestRecord
from inferencex.runtime.server.errors import TooManyRequests
from inferencex.runtime.server.telemetry.logs import RequestLog, configure_logging


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def finished(**fields: object) -> RequestRecord:
    outputs = (CompletionOutput(0, "a secret answer", (1, 2, 3), (), None, None, "length", None),)
    output = RequestOutput("r", "a secret question", (1, 2), outputs, None, 1, RequestMetrics(1.0, 1.25, 1.5, 2.0, 3))
    given = {"prompt_tokens": 2, "seconds": 1.0, "output": output, **fields}
    return RequestRecord("req-1", "m", "2", "chat", "key-1", **given)  # type: ignore[arg-type]


def test_a_request_is_one_json_object() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    log = RequestLog()
    log.accepted(finished())  # only for those who debug
    log.finished(finished())
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "info",
        "logger": "inferencex.requests",
        "event": "request",
        "request_id": "req-1",
        "kind": "chat",
        "model": "m",
        "version": "2",
        "caller": "key-1",
        "stream": False,
        "prompt_tokens": 2,
        "status": "ok",
        "duration": 1.0,
        "output_tokens": 3,
        "cached_tokens": 1,
        "finish_reasons": ["length"],
        "queue_time": 0.25,
        "ttft": 0.5,
    }


def test_texts_are_logged_only_when_asked_for() -> None:
    for log_prompts in (False, True):
        stream = io.StringIO()
        configure_logging("json", "debug", stream)
        RequestLog(log_prompts=log_prompts).finished(finished())
        assert ("a secret question" in stream.getvalue()) == log_prompts
        assert ("a secret answer" in stream.getvalue()) == log_prompts


def test_a_refusal_is_logged_with_its_reason() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    RequestLog().rejected(finished(output=None, error=TooManyRequests("the queue is full", code="queue_full")))
    entry = json.loads(stream.getvalue())
    assert (entry["event"], entry["error"], entry["http_status"]) == ("rejected", "queue_full", 429)


def test_people_read_one_line_that_clients_cannot_break() -> None:
    stream = io.StringIO()
    configure_logging("text", "info", stream)
    record = finished()
    record.request_id = "x\n2026-01-01 INFO forged=\x1b[31m"
    RequestLog().finished(record)
    (line,) = stream.getvalue().splitlines()
    assert "\x1b" not in line and ' request request_id="x\\n2026' in line and " status=ok " in line


def test_whatever_else_is_logged_keeps_its_details() -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    try:
        int("x")
    except ValueError:
        logging.getLogger("some.library").exception("it %s", "failed", extra={"status": 500, "path": "/x"})
    entry = json.loads(stream.getvalue())
    assert entry["message"] == "it failed" and "ValueError" in entry["exception"]
    assert (entry["event"], entry["logger"], entry["status"], entry["path"]) == ("log", "some.library", 500, "/x")
    text = io.StringIO()
    configure_logging("text", "warning", text)
    logging.getLogger("some.library").info("quiet")
    logging.getLogger("some.library").warning("loud")
    assert text.getvalue().endswith("WARNING loud\n") and "quiet" not in text.getvalue()
