"""Calls as Llama 3 writes them: the answer is `{"name": ..., "parameters": {...}}`, or that after `<|python_tag|>`."""

from __future__ import annotations

import re
from collections.abc import Collection

from inferencex.runtime.server.tools.base import Opening, ToolParser, held_back
from inferencex.runtime.server.tools.call_object import CallObject

PYTHON_TAG = "<|python_tag|>"

_BEFORE_FIRST = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s;,]*")


class Llama3Parser(ToolParser):
    """Finds calls that the answer begins with, further ones right after them, and any after the tag."""

    special_markers = True

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__(functions)
        self._expected = True  # an object here would be a call
        self._between = _BEFORE_FIRST

    def _look(self, text: str, final: bool) -> Opening | int:
        if self._expected:
            space = self._between.match(text)
            start = 0 if space is None else space.end()
            rest = text[start:]
            if rest.startswith("{"):
                self._expected = False
                return Opening(0, start, CallObject(self.functions))
            if not final and PYTHON_TAG.startswith(rest):
                return 0
            if rest.startswith(PYTHON_TAG):
                return Opening(0, start + len(PYTHON_TAG), CallObject(self.functions))
            if final and not rest and self._any_complete:
                return Opening(0, start, None) if start else 0
            self._expected = False
        start = text.find(PYTHON_TAG)
        if start >= 0:
            return Opening(start, start + len(PYTHON_TAG), CallObject(self.functions))
        return len(text) - (0 if final else held_back(text, PYTHON_TAG))

    def _ended(self) -> None:
        self._expected = True
        self._between = _BETWEEN

    def _refused(self) -> None:
        self._expected = False
