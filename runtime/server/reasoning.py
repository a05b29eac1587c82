"""Parts what a model thinks, between `<think>` and `</think>`, from what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from inferencex.runtime.server.tools.base import held_back

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer. `is_reasoning`: it is thought, not said."""

    is_reasoning: bool
    text: str


class _State(Enum):
    START = auto()  # nothing but white space so far
    REASONING = auto()
    AFTER = auto()  # the white space between the closing tag and the answer
    CONTENT = auto()


class ReasoningSplitter:
    """Splits one answer, as its text comes; however it is cut, the parts joined are the same.

    Only an answer that begins with the opening tag has reasoning, or one whose prompt ends with that tag. White space
    at both ends of the reasoning, and in front of the answer behind it, is left out. Reasoning that is cut short
    is all there is.
    """

    def __init__(self, prompt: str | None) -> None:
        """Take the rendered prompt; None for one that is not text."""
        self._state = _State.START
        self._opened = prompt is not None and prompt.rstrip().endswith(OPEN)
        self._unread = ""
        self._white = ""
        self._any_reasoning = False

    def push(self, text: str) -> list[Part]:
        """Take the next piece of the answer and return what is certain by now."""
        if self._state is _State.CONTENT and not self._unread:
            return [Part(False, text)] if text else []
        self._unread += text
        return self._advance(final=False)

    def finish(self) -> list[Part]:
        """Return what was held back; nothing follows."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        if self._state is _State.START:
            self._begin(final)
        if self._state is _State.REASONING:
            self._reason(parts, final)
        if self._state is _State.AFTER:
            self._unread = self._unread.lstrip()
            if self._unread:
                self._state = _State.CONTENT
        if self._state is _State.CONTENT and self._unread:
            parts.append(Part(False, self._unread))
            self._unread = ""
        return parts

    def _begin(self, final: bool) -> None:
        text = self._unread.lstrip()
        if text.startswith(OPEN):
            self._state = _State.REASONING
            self._unread = text[len(OPEN) :]
        elif final or not OPEN.startswith(text):
            self._state = _State.REASONING if self._opened else _State.CONTENT

    def _reason(self, parts: list[Part], final: bool) -> None:
        end = self._unread.find(CLOSE)
        size = end if end >= 0 else len(self._unread) - (0 if final else held_back(self._unread, CLOSE))
        text = self._white + self._unread[:size]
        if not self._any_reasoning:
            text = text.lstrip()
        visible = text.rstrip()
        self._white = text[len(visible) :]
        if visible:
            self._any_reasoning = True
            parts.append(Part(True, visible))
        self._unread = self._unread[size:]
        if end >= 0:
            self._unread = self._unread[len(CLOSE) :]
            self._state = _State.AFTER


def thinks(template: str) -> bool:
    """Whether a chat template is one of a model that thinks between these tags."""
    return CLOSE in template
