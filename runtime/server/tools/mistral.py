"""Calls as Mistral models write them: `[TOOL_CALLS][{"name": ...}]`, or the newer `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection

from inferencex.runtime.server.tools.base import Opening, ToolParser, held_back
from inferencex.runtime.server.tools.call_list import CallList
from inferencex.runtime.server.tools.call_object import CallObject
from inferencex.runtime.server.tools.json_value import JsonValue

MARKER = "[TOOL_CALLS]"

_NAME = re.compile(r"\s*([A-Za-z0-9_.-]+)(\[CALL_ID\][A-Za-z0-9]+)?(\[ARGS\])?\s*$")
_NAME_CHARACTERS = re.compile(r"[^{]*")
_MAX_HEADER = 512


class MistralParser(ToolParser):
    """Finds calls of both forms. Ids are nine letters and digits, the only ones that Mistral's templates take back."""

    special_markers = True

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__(functions)
        self._list = CallList()

    def _look(self, text: str, final: bool) -> Opening | int:
        if self._list.is_open:
            found = self._list.next(text, self.functions, final)
            if found is not None:
                return found
        start = text.find(MARKER)
        if start < 0:
            return len(text) - (0 if final else held_back(text, MARKER))
        end = start + len(MARKER)
        while end < len(text) and text[end].isspace():
            end += 1
        if end == len(text) and not final:
            return start
        if text[end : end + 1] != "[":
            return Opening(start, start + len(MARKER), _NamedArguments(self.functions))
        self._list.open()
        return Opening(start, end + 1, CallObject(self.functions))

    def _refused(self) -> None:
        self._list.close()

    def new_id(self) -> str:
        """See `ToolParser`."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class _NamedArguments:
    """`name[ARGS]{...}`. See `CallReader`."""

    def __init__(self, functions: Collection[str]) -> None:
        self.name: str | None = None
        self.failed = False
        self._functions = functions
        self._header = ""
        self._value = JsonValue("{")
        self._arguments = ""

    @property
    def done(self) -> bool:
        return self._value.done

    def take(self, text: str, start: int) -> int:
        position = start
        if self.name is None:
            header = _NAME_CHARACTERS.match(text, start)
            position = start if header is None else header.end()
            self._header += text[start:position]
            self.failed = len(self._header) > _MAX_HEADER
            if position == len(text) or self.failed:
                return position
            known = _NAME.match(self._header)
            if known is None or known[1] not in self._functions:
                self.failed = True
                return position
            self.name = known[1]
        end = self._value.take(text, position)
        self.failed = self._value.failed
        self._arguments += text[position:end]
        return end

    def drain(self) -> str:
        piece, self._arguments = self._arguments, ""
        return piece

    def finish(self) -> None:
        self.failed = not self.done
