"""The text that ships with Python, as prose."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest

from inferencex.convert.calibrate import builtin_text
from inferencex.convert.calibrate.builtin_text import BuiltinText
from inferencex.convert.calibrate.documents import Reading
from inferencex.formats.errors import OptionError


def _paragraphs(topics: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(builtin_text, "_topics", lambda: topics)
    return [p for document in BuiltinText().documents(Reading(str)) for p in document.text.split("\n\n")]


def test_markup_goes_and_words_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = (
        "Heading\n*******\n\nA *starred*\nand a **strong** word;\n2 * 3 * 4, *args and **kwargs stay.\n\n"
        "   stmt ::= a | b\n           | c\n\n+---+---+\n| a | b |\n+---+---+\n\n"
        "   An indented note that\n   goes on.\n\n   x = 1\n   if x:\n       y = 2\n\n"
        "* first item\n  of two\n* second\n"
    )
    assert _paragraphs({"a": topic}, monkeypatch) == [
        "Heading",
        "A starred and a strong word; 2 * 3 * 4, *args and **kwargs stay.",
        "An indented note that goes on.",
        "x = 1\nif x:\n    y = 2",
        "* first item of two\n* second",
    ]


def test_paragraphs_that_topics_quote_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = {"b": "One.\n\nTwo\nlines.\n\nTwo\nlines.\n", "a": "   Two\n   lines.\n", "c": "One.\n"}
    assert _paragraphs(topics, monkeypatch) == ["Two lines.", "One."]


def test_the_real_text_is_long_and_repeats_nothing() -> None:
    paragraphs = [p for document in BuiltinText().documents(Reading(str)) for p in document.text.split("\n\n")]
    long = [p for p in paragraphs if len(p) > 80]
    assert sum(map(len, long)) > 200_000
    assert len(long) == len(set(long))
    assert not [p for p in paragraphs if "::=" in p.splitlines()[0] or re.match(r"\+[-=]+\+", p)]
    assert not [p for p in paragraphs if re.search(r"^([*=~-])\1{3,}$", p, re.MULTILINE)]
    prose = [p for p in long if "\n" not in p]
    assert len(prose) > 0.7 * len(long)


def test_a_python_without_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data", ModuleType("pydoc_data"))
    monkeypatch.delitem(sys.modules, "pydoc_data.topics", raising=False)
    with pytest.raises(OptionError, match=r"lacks the module pydoc_data\.topics.*install"):
        list(BuiltinText().documents(Reading(str)))
