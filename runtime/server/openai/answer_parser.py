"""An answer's text, as it comes, parted into reasoning, content and calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from inferencex.runtime.server.reasoning import ReasoningSplitter
from inferencex.runtime.server.tools import CallArguments, CallBroken, CallStart, Event, Text, ToolParser


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks."""

    text: str


AnswerEvent: TypeAlias = Reasoning | Event


class AnswerParser:
    """Parts one answer. Without parallel calls, those after the first are left out."""

    def __init__(self, splitter: ReasoningSplitter | None, tools: ToolParser | None, parallel: bool = True) -> None:
        self._splitter = splitter
        self._tools = tools
        self._parallel = parallel
        self._calls: set[int] = set()  # that have begun and are not broken
        self._dropped: set[int] = set()

    @property
    def has_calls(self) -> bool:
        """Whether the answer calls anything."""
        return bool(self._calls)

    def push(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of text and return what is certain by now."""
        if self._splitter is None:
            return self._said(text)
        events: list[AnswerEvent] = []
        for part in self._splitter.push(text):
            events += [Reasoning(part.text)] if part.is_reasoning else self._said(part.text)
        return events

    def finish(self) -> list[AnswerEvent]:
        """Return what was held back; nothing follows."""
        events: list[AnswerEvent] = []
        if self._splitter is not None:
            for part in self._splitter.finish():
                events += [Reasoning(part.text)] if part.is_reasoning else self._said(part.text)
        if self._tools is not None:
            events += self._counted(self._tools.finish())
        return events

    def _said(self, text: str) -> list[AnswerEvent]:
        if self._tools is None:
            return [Text(text)] if text else []
        return self._counted(self._tools.push(text))

    def _counted(self, events: list[Event]) -> list[AnswerEvent]:
        kept: list[AnswerEvent] = []
        for event in events:
            if isinstance(event, CallStart):
                if self._calls and not self._parallel:
                    self._dropped.add(event.index)
                else:
                    self._calls.add(event.index)
            elif isinstance(event, CallBroken):
                self._calls.discard(event.index)
            if isinstance(event, Text) or event.index not in self._dropped:
                kept.append(event)
        return kept


@dataclass
class Call:
    """A call of an answer that is whole."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Answer:
    """An answer that is whole; `content` and `reasoning` are None where there is none."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)


def parse_answer(parser: AnswerParser, text: str) -> Answer:
    """Part a whole text."""
    answer = Answer()
    calls: dict[int, Call] = {}
    for event in parser.push(text) + parser.finish():
        if isinstance(event, Reasoning):
            answer.reasoning = (answer.reasoning or "") + event.text
        elif isinstance(event, Text):
            answer.content = (answer.content or "") + event.text
        elif isinstance(event, CallStart):
            calls[event.index] = Call(event.id, event.name)
        elif isinstance(event, CallArguments):
            calls[event.index].arguments += event.text
        else:
            calls.pop(event.index, None)
    answer.calls = list(calls.values())
    if answer.content is None and not answer.calls:
        answer.content = ""
    return answer
