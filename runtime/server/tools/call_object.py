"""A call written as a JSON object: `{"name": ..., "arguments": {...}}`, its keys in any order."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from inferencex.runtime.server.tools.json_value import JsonValue

_ARGUMENTS = ("arguments", "parameters")
_WHITE = " \t\n\r"


class _State(Enum):
    OPEN = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    AFTER = auto()


class CallObject:
    """Reads one such object. Arguments may also be a JSON object inside a string, or left out: then they are `{}`.

    Keys other than these are passed over if their values are texts or structures. A key that comes twice, or a name
    that is not one of `functions`, makes it no call. See `CallReader`.
    """

    def __init__(self, functions: Collection[str]) -> None:
        self.name: str | None = None
        self.done = False
        self.failed = False
        self._functions = functions
        self._state = _State.OPEN
        self._value = JsonValue('"')
        self._text = ""  # of the key or value being read
        self._key = ""
        self._keys: set[str] = set()
        self._found_name: str | None = None
        self._arguments = ""
        self._has_arguments = False

    def take(self, text: str, start: int) -> int:
        """See `CallReader`."""
        position = start
        while position < len(text) and not (self.done or self.failed):
            if self._state in (_State.KEY, _State.FIRST_KEY, _State.VALUE) and (
                self._text or text[position] not in _WHITE
            ):
                position = self._read_value(text, position)
            else:
                self._structural(text[position])
                position += 1
        return position

    def drain(self) -> str:
        """See `CallReader`."""
        piece, self._arguments = self._arguments, ""
        return piece

    def finish(self) -> None:
        """See `CallReader`."""
        self.failed = not self.done

    def _structural(self, char: str) -> None:
        if char in _WHITE:
            return
        if self._state is _State.OPEN:
            self._expect(char, "{", _State.FIRST_KEY)
        elif self._state is _State.COLON:
            self._expect(char, ":", _State.VALUE)
            self._value = JsonValue("{" + '"') if self._key in _ARGUMENTS else JsonValue()
        elif char == ",":
            self._state = _State.KEY
            self._value = JsonValue('"')
        else:
            self._expect(char, "}", _State.AFTER)
            self._close()

    def _expect(self, char: str, wanted: str, state: _State) -> None:
        self._state = state
        self.failed = self.failed or char != wanted

    def _read_value(self, text: str, position: int) -> int:
        if self._state is _State.FIRST_KEY and not self._text and text[position] == "}":
            self._close()
            return position + 1
        end = self._value.take(text, position)
        streamed = self._state is _State.VALUE and self._key in _ARGUMENTS and (self._text or text[position])[0] == "{"
        self._text += text[position:end]
        if streamed:
            self._has_arguments = True
            self._arguments += text[position:end]
            self.name = self._found_name
        if self._value.failed:
            self.failed = True
        elif self._value.done:
            self._value_done(streamed)
        return end

    def _value_done(self, streamed: bool) -> None:
        text, self._text = self._text, ""
        if self._state is not _State.VALUE:
            self._key = json.loads(text)
            name = "arguments" if self._key in _ARGUMENTS else self._key
            self.failed = name in self._keys
            self._keys.add(name)
            self._state = _State.COLON
            return
        self._state = _State.AFTER
        if self._key == "name":
            self._found_name = json.loads(text) if text[0] == '"' else None
            self.failed = self._found_name not in self._functions
            if self._has_arguments and not self.failed:
                self.name = self._found_name
        elif self._key in _ARGUMENTS and not streamed:
            self._unwrap(text)

    def _unwrap(self, text: str) -> None:
        """Take arguments that are a JSON object inside a string."""
        inner = json.loads(text)
        reader = JsonValue("{")
        end = reader.take(inner, 0)
        surrogates = any("\ud800" <= char <= "\udfff" for char in inner)  # escapes can spell what is no text
        self.failed = not reader.done or inner[end:].strip() != "" or surrogates
        self._has_arguments = True
        self._arguments = inner[:end].strip()
        self.name = self._found_name

    def _close(self) -> None:
        if self.failed or self._found_name is None:
            self.failed = True
            return
        if not self._has_arguments:
            self._arguments = "{}"
        self.name = self._found_name
        self.done = True
