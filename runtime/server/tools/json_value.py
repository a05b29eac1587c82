"""Follows one JSON value as its characters come, and says at the first wrong one that it is none."""

from __future__ import annotations

import re
from enum import Enum, auto

MAX_DEPTH = 64  # of arguments; beyond it the readers of clients may fail

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WHITE = " \t\n\r"
_LITERALS = {"t": "true", "f": "false", "n": "null"}


class _State(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()  # after `[`
    FIRST_KEY = auto()  # after `{`
    KEY = auto()  # after `,` in an object
    COLON = auto()
    AFTER = auto()  # after a value inside an array or object
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    NUMBER = auto()
    LITERAL = auto()


class JsonValue:
    """Reads one string, array or object. `done` after its last character, `failed` at the first that is wrong."""

    def __init__(self, begins_with: str = '"[{') -> None:
        self.done = False
        self.failed = False
        self._begins_with = begins_with
        self._state = _State.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._rest = ""  # of a literal; hexadecimal digits to come; the number so far

    def take(self, text: str, start: int) -> int:
        """Read `text` from `start`, and return where the value or the text ends."""
        position, size = start, len(text)
        while position < size and not (self.done or self.failed):
            if self._state is _State.STRING:
                plain = _PLAIN.match(text, position)
                position = size if plain is None else plain.end()
                if position == size:
                    break
            if self._step(text[position]):
                position += 1
        return position

    def _step(self, char: str) -> bool:
        """Take one character; False when it ends a number and is yet to be looked at."""
        state = self._state
        if state is _State.STRING:
            self._in_string(char)
        elif state is _State.ESCAPE:
            self._state, self._rest = (_State.HEX, "xxxx") if char == "u" else (_State.STRING, "")
            self.failed = char not in 'u"\\/bfnrt'
        elif state is _State.HEX:
            self._rest = self._rest[1:]
            self._state = _State.HEX if self._rest else _State.STRING
            self.failed = char not in "0123456789abcdefABCDEF"
        elif state is _State.NUMBER:
            return self._in_number(char)
        elif state is _State.LITERAL:
            self.failed = char != self._rest[0]
            self._rest = self._rest[1:]
            if not self._rest:
                self._state = _State.AFTER
        elif char not in _WHITE:
            self._structural(char)
        return True

    def _in_string(self, char: str) -> None:
        if char == "\\":
            self._state = _State.ESCAPE
        elif char != '"':
            self.failed = True  # a control character
        elif self._is_key:
            self._is_key = False
            self._state = _State.COLON
        else:
            self._value_ended()

    def _in_number(self, char: str) -> bool:
        if char in "0123456789+-.eE":
            self._rest += char
            return True
        if _NUMBER.fullmatch(self._rest):
            self._state = _State.AFTER
        else:
            self.failed = True
        return False

    def _structural(self, char: str) -> None:
        state = self._state
        if state is _State.COLON:
            self._state, self.failed = _State.VALUE, char != ":"
        elif state in (_State.FIRST_KEY, _State.KEY):
            if char == '"':
                self._is_key, self._state = True, _State.STRING
            else:
                self._close(char, state is _State.FIRST_KEY)
        elif state is _State.AFTER:
            if char == ",":
                self._state = _State.KEY if self._open[-1] == "{" else _State.VALUE
            else:
                self._close(char, True)
        elif state is _State.FIRST_ITEM and char == "]":
            self._close(char, True)
        else:
            self._begin(char)

    def _begin(self, char: str) -> None:
        if not self._open and char not in self._begins_with:
            self.failed = True
        elif char == '"':
            self._state = _State.STRING
        elif char in "[{":
            self._open.append(char)
            self._state = _State.FIRST_ITEM if char == "[" else _State.FIRST_KEY
            self.failed = len(self._open) > MAX_DEPTH
        elif char in _LITERALS:
            self._state, self._rest = _State.LITERAL, _LITERALS[char][1:]
        elif char in "-0123456789":
            self._state, self._rest = _State.NUMBER, char
        else:
            self.failed = True

    def _close(self, char: str, allowed: bool) -> None:
        if allowed and char == {"[": "]", "{": "}"}[self._open[-1]]:
            self._open.pop()
            self._value_ended()
        else:
            self.failed = True

    def _value_ended(self) -> None:
        if self._open:
            self._state = _State.AFTER
        else:
            self.done = True
