"""What is read of an answer: when its text arrived, and, once at the end, what the server counted.

Reading must cost little, for the load generator often shares its machine with the server. So of a stream JSON is
parsed up to the first text, and then only of its last events; those between are counted.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from inferencex.runtime.load_test.records import RequestRecord
from inferencex.runtime.load_test.sse import EventSplitter

_TAIL = 4  # events at the end of a stream that may hold no text: why it ended, usage, timings
_ERRORS = (b'{"error"', b'{"object":"error"', b'{"object": "error"')
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")
_SHOWN = 300  # characters of an error's message that are kept


class Answer(ABC):
    """Reads one answer into a record; the two kinds of answers say how.

    `max_tokens` is how many tokens were asked for: those of an answer that ended because there were so many, where
    the server counts none.
    """

    def __init__(self, record: RequestRecord, max_tokens: int) -> None:
        self.record = record
        self._max_tokens = max_tokens
        self._status = 0
        self._whole: list[bytes] = []  # the body, of an answer that is not streamed or an error

    def begin(self, status: int) -> None:
        """Take the status."""
        self._status = status

    def body(self, data: bytes, now: float) -> None:
        """Take bytes of the body."""
        self._whole.append(data)

    def finish(self) -> None:
        """Complete the record, now that all of the answer is there."""
        if self._status == 200:
            self._complete()
            return
        content = b"".join(self._whole)
        self.record.fail(f"http {self._status}", error_message(content) or "no message")

    @abstractmethod
    def _complete(self) -> None:
        """Fill in the record of an answer that is well."""

    def _count(self, events: int | None) -> None:
        """Say how many tokens there were, where the server did not."""
        if self.record.output_tokens is None:
            self.record.output_tokens = self._max_tokens if self.record.finish_reason == "length" else events

    def _note(self, event: dict[str, Any]) -> None:
        """Take what the server says of the answer as a whole."""
        usage = event.get("usage")
        if isinstance(usage, dict):
            if isinstance(usage.get("prompt_tokens"), int):
                self.record.prompt_tokens = usage["prompt_tokens"]
            if isinstance(usage.get("completion_tokens"), int):
                self.record.output_tokens = usage["completion_tokens"]
        for choice in _choices(event):
            if isinstance(choice.get("finish_reason"), str):
                self.record.finish_reason = choice["finish_reason"]


class WholeAnswer(Answer):
    """An answer in one piece."""

    def _complete(self) -> None:
        event = _parse(b"".join(self._whole))
        if event is None or not _choices(event):
            self.record.fail("protocol", "the answer is not a JSON object with choices")
            return
        self._note(event)
        self._count(None)


class StreamedAnswer(Answer):
    """An answer as server-sent events."""

    def __init__(self, record: RequestRecord, max_tokens: int) -> None:
        super().__init__(record, max_tokens)
        self._splitter = EventSplitter()
        self._tail: deque[bytes] = deque(maxlen=_TAIL)  # one entry for each of the last arrivals
        self._ended = False

    def body(self, data: bytes, now: float) -> None:
        """Take bytes of the body."""
        if self._status != 200:
            self._whole.append(data)
            return
        arrivals, tail = self.record.arrivals, self._tail
        for event in self._splitter.feed(data):
            if event == b"[DONE]":
                self._ended = True
            elif event.startswith(_ERRORS):
                self.record.fail("stream", error_message(event) or "an error without a message")
            elif arrivals or self._begins(event):
                arrivals.append(now)
                tail.append(event)

    def _begins(self, event: bytes) -> bool:
        """Whether this event is the first with text."""
        parsed = _parse(event)
        if parsed is None:
            self.record.fail("protocol", "an event of the stream is not a JSON object")
            return False
        if _has_text(parsed):
            return True
        self._note(parsed)
        return False

    def _complete(self) -> None:
        arrivals = self.record.arrivals
        first = len(arrivals) - len(self._tail)
        without_text = []
        for place, data in enumerate(self._tail, start=first):
            event = _parse(data)
            if event is None:
                self.record.fail("protocol", "an event of the stream is not a JSON object")
                continue
            if not _has_text(event):
                without_text.append(place)
            self._note(event)
        for place in reversed(without_text):
            del arrivals[place]
        self._count(len(arrivals))
        if not self._ended and self.record.finish_reason is None:
            self.record.fail("incomplete", "the stream ended before the answer did")


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(data)
    except ValueError:  # also bytes that are no UTF-8
        return None
    return event if isinstance(event, dict) else None


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    choices = event.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _has_text(event: dict[str, Any]) -> bool:
    """Whether an event brings a token.

    A token whose bytes are no text yet comes as an empty text; the role, or the reason of the end, alone is none.
    """
    for choice in _choices(event):
        delta = choice.get("delta")
        if isinstance(delta, dict):
            if any(delta.get(name) for name in _TEXTS):
                return True
            if "role" in delta or "content" not in delta:
                continue
        elif choice.get("text"):
            return True
        if choice.get("finish_reason") is None:
            return True
    return False


def error_message(content: bytes) -> str | None:
    """Return what an error's body says, whichever way servers put it; None when it says nothing."""
    event = _parse(content)
    if event is None:
        return content.decode(errors="replace").strip()[:_SHOWN] or None
    error = event.get("error", event.get("detail", event))
    message = error.get("message", error) if isinstance(error, dict) else error
    text = message if isinstance(message, str) else json.dumps(message)
    return text[:_SHOWN] or None
