"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Collection

from inferencex.runtime.server.tools.base import Opening, ToolParser, held_back
from inferencex.runtime.server.tools.call_object import CallObject

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Finds calls between tags. The closing tag may be missing at the end of the text."""

    def _look(self, text: str, final: bool) -> Opening | int:
        start = text.find(OPEN)
        if start >= 0:
            return Opening(start, start + len(OPEN), _TaggedObject(self.functions))
        return len(text) - (0 if final else held_back(text, OPEN))


class _TaggedObject:
    """The object and the tag that closes it. See `CallReader`."""

    def __init__(self, functions: Collection[str]) -> None:
        self.done = False
        self.failed = False
        self._object = CallObject(functions)
        self._tag = CLOSE

    @property
    def name(self) -> str | None:
        return self._object.name

    def take(self, text: str, start: int) -> int:
        position = self._object.take(text, start)
        self.failed = self._object.failed
        while self._object.done and position < len(text) and not (self.done or self.failed):
            char = text[position]
            position += 1
            if char == self._tag[0]:
                self._tag = self._tag[1:]
                self.done = not self._tag
            elif self._tag != CLOSE or not char.isspace():
                self.failed = True
        return position

    def drain(self) -> str:
        return self._object.drain()

    def finish(self) -> None:
        self.done = self._object.done and self._tag == CLOSE
        self.failed = not self.done
