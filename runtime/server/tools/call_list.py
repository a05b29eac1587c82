"""Calls in a JSON array: what comes between one object and the next."""

from __future__ import annotations

import re
from collections.abc import Collection

from inferencex.runtime.server.tools.base import Opening
from inferencex.runtime.server.tools.call_object import CallObject

_SPACE = re.compile(r"\s*")


class CallList:
    """An array of calls that is being read; each of its objects is a call of its own."""

    def __init__(self) -> None:
        self.is_open = False

    def open(self) -> None:
        """The bracket that opens the array was read."""
        self.is_open = True

    def close(self) -> None:
        """What follows is not part of the array."""
        self.is_open = False

    def next(self, text: str, functions: Collection[str], final: bool) -> Opening | int | None:
        """Return the next call's opening in text that follows a call; 0 while that is open, None when it is over."""
        space = _SPACE.match(text)
        start = 0 if space is None else space.end()
        if start == len(text):
            return None if final else 0
        if text[start] == ",":
            return Opening(0, start + 1, CallObject(functions))
        self.is_open = False
        return Opening(0, start + 1, None) if text[start] == "]" else None
