"""Ways to feed a parser, and its events in one piece."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from inferencex.runtime.server.tools import CallArguments, CallBroken, CallStart, Event, Text, ToolParser


@dataclass
class Read:
    """What was found: the content, each call with its arguments, and which of them were taken back."""

    content: str = ""
    calls: dict[int, tuple[str, str]] = field(default_factory=dict)
    broken: list[int] = field(default_factory=list)

    @property
    def whole(self) -> list[tuple[str, str]]:
        return [call for index, call in self.calls.items() if index not in self.broken]


def collect(events: Iterable[Event]) -> Read:
    read = Read()
    for event in events:
        if isinstance(event, Text):
            read.content += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(read.calls)
            read.calls[event.index] = (event.name, "")
        elif isinstance(event, CallArguments):
            name, arguments = read.calls[event.index]
            read.calls[event.index] = (name, arguments + event.text)
        elif isinstance(event, CallBroken):
            read.broken.append(event.index)
    return read


def feed(parser: ToolParser, pieces: Iterable[str]) -> Read:
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    return collect([*events, *parser.finish()])


def cut(text: str, places: Sequence[int]) -> list[str]:
    """Cut a text at some places."""
    ends = [0, *sorted({min(place, len(text)) for place in places}), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]
