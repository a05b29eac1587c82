"""What a tool-call parser is: text in, as it comes; content and calls out, as soon as they are certain."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the function `name` begins. `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; joined, the pieces are one JSON object as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A call that had begun turns out to be none. Its text follows as content."""

    index: int


Event: TypeAlias = Text | CallStart | CallArguments | CallBroken


class CallReader(Protocol):
    """Reads one call, from where it opens. It is asked for nothing more once it is `done` or has `failed`."""

    @property
    def name(self) -> str | None:
        """Of the function, set once the arguments have begun, so that both can be told."""
        ...

    @property
    def done(self) -> bool:
        """The call is complete, and what follows is not part of it."""
        ...

    @property
    def failed(self) -> bool:
        """It is no call after all."""
        ...

    def take(self, text: str, start: int) -> int:
        """Read on in `text` from `start`, and return where it stopped: the end of the text, or that of the call."""
        ...

    def drain(self) -> str:
        """Return what is new of the arguments. Only once `name` is set."""
        ...

    def finish(self) -> None:
        """No text follows: become `done` or `failed`."""
        ...


@dataclass(frozen=True, slots=True)
class Opening:
    """Where a call may begin in unread text.

    start:  the text before it is content
    end:    the call's own text begins there; `text[start:end]` is the opening itself, such as `<tool_call>`
    reader: reads the call; None: nothing opens, and `text[start:end]` is only left out
    """

    start: int
    end: int
    reader: CallReader | None


class ToolParser(ABC):
    """Finds the calls in one answer.

    However the text is cut into pieces, the events are the same but for the cuts in `Text` and `CallArguments`.
    White space between content and calls is left out. What looks like a call and is none is content, every
    character of it; also a call of a function that was not offered, and one that the end of the text cuts short.

    special_markers: the opening is a special token, which text must then be decoded with
    """

    special_markers: ClassVar[bool] = False

    def __init__(self, functions: Collection[str]) -> None:
        self.functions = frozenset(functions)
        self._unread = ""
        self._white = ""  # at the end of what was read: content, unless a call follows
        self._opening = ""
        self._reader: CallReader | None = None
        self._read = 0  # how much of the unread text the reader has taken
        self._announced = False
        self._num_calls = 0  # broken ones included
        self._any_complete = False
        self._events: list[Event] = []

    def push(self, text: str) -> list[Event]:
        """Take the next piece of the answer and return what is certain by now."""
        self._unread += text
        return self._advance(final=False)

    def finish(self) -> list[Event]:
        """Return what was held back; nothing follows."""
        return self._advance(final=True)

    @abstractmethod
    def _look(self, text: str, final: bool) -> Opening | int:
        """Find the next opening in `text`; else how much of it is content for certain, all of it when `final`."""

    def _ended(self) -> None:  # noqa: B027 (few need it)
        """A call is complete; unread text follows it."""

    def _refused(self) -> None:  # noqa: B027 (few need it)
        """The last opening was none; what follows it is read again as content, in which other calls may open."""

    def new_id(self) -> str:
        """Return an id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def _advance(self, final: bool) -> list[Event]:
        while self._read_call(final) if self._reader is not None else self._read_content(final):
            pass
        events, self._events = self._events, []
        return events

    def _read_content(self, final: bool) -> bool:
        """Read up to the next opening. Returns whether there is more to do."""
        text = self._unread
        found = self._look(text, final)
        if isinstance(found, int):
            self._say(text[:found])
            self._unread = text[found:]
            if final and self._white and not self._any_complete:
                self._events.append(Text(self._white))
                self._white = ""
            return False
        self._say(text[: found.start])
        self._unread = text[found.end :]
        if found.reader is not None:
            self._opening = self._white + text[found.start : found.end]
            self._white = ""
            self._reader, self._read, self._announced = found.reader, 0, False
        return True

    def _read_call(self, final: bool) -> bool:
        reader = self._reader
        if reader is None:
            return True
        self._read = reader.take(self._unread, self._read)
        if final and not (reader.done or reader.failed):
            reader.finish()
        if reader.name is not None:
            if not self._announced:
                self._announced = True
                self._events.append(CallStart(self._num_calls, self.new_id(), reader.name))
            piece = reader.drain()
            if piece:
                self._events.append(CallArguments(self._num_calls, piece))
        if reader.failed:
            if self._announced:
                self._events.append(CallBroken(self._num_calls))
                self._num_calls += 1
            self._reader = None
            self._refused()
            self._say(self._opening)
            return True
        if reader.done:
            self._num_calls += 1
            self._any_complete = True
            self._unread = self._unread[self._read :]
            self._reader = None
            self._ended()
            return True
        return False

    def _say(self, text: str) -> None:
        if not text:
            return
        text = self._white + text
        visible = text.rstrip()
        self._white = text[len(visible) :]
        if visible:
            self._events.append(Text(visible))


def held_back(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `marker`."""
    longest = min(len(marker) - 1, len(text))
    start = text.find(marker[0], len(text) - longest)
    while start >= 0:  # hardly ever: this runs for every token
        if marker.startswith(text[start:]):
            return len(text) - start
        start = text.find(marker[0], start + 1)
    return 0
