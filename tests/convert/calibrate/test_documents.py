"""Rows to documents, and long texts to sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencex.convert.calibrate.documents import Document, document_of, sections
from inferencex.formats.errors import OptionError, RequestError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def _render(messages: Sequence[Mapping[str, Any]]) -> str:
    return "|".join(f"{m['role']}:{m['content']}" for m in messages)


@pytest.mark.parametrize(
    ("row", "column", "expected"),
    [
        ({"id": 3, "text": "words"}, None, Document("words")),
        ({"content": "words"}, None, Document("words")),
        ({"body": "words", "text": "not these"}, "body", Document("words")),
        ({"messages": CHAT}, None, Document("user:hi|assistant:ho", chat=True)),
        ({"text": None, "messages": CHAT}, None, Document("user:hi|assistant:ho", chat=True)),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
            None,
            Document("user:hi|assistant:ho", chat=True),
        ),
        ({"text": " \n"}, None, None),
        ({"text": None}, None, None),
        ({"messages": []}, None, None),
    ],
)
def test_rows(row: dict[str, Any], column: str | None, expected: Document | None) -> None:
    assert document_of(row, "file, line 1", column, _render) == expected


@pytest.mark.parametrize(
    ("row", "column", "message"),
    [
        (
            {"id": 1, "body": "x"},
            None,
            "line 1: there is no column 'text' or 'messages'; its columns are 'id', 'body'",
        ),
        ({"text": "x"}, "body", "no column 'body'; its columns are 'text'"),
        ({"text": 7}, None, "column 'text' holds a int, expected a text or a list"),
        ({"text": b"raw"}, None, "holds a bytes"),
        ({"messages": ["hi"]}, None, "a chat is a list of objects"),
    ],
)
def test_rows_that_hold_no_text(row: dict[str, Any], column: str | None, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        document_of(row, "file, line 1", column, _render)


@pytest.mark.parametrize("role", [None, 7, ["human"], {"a": 1}])
def test_roles_that_are_no_text_are_left_to_the_template(role: Any) -> None:
    seen: list[Any] = []

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        seen.extend(message["role"] for message in messages)
        return "text"

    document_of({"conversations": [{"from": role, "value": "hi"}]}, "file, line 1", None, render)
    assert seen == [role]


def test_a_template_that_fails_names_the_row() -> None:
    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        raise RequestError("the chat template 'default' cannot render these messages: roles must alternate")

    with pytest.raises(OptionError, match=r"file, line 9, column 'messages': the chat template .* must alternate"):
        document_of({"messages": CHAT}, "file, line 9", None, render)


@given(st.lists(st.text(alphabet="ab \n", max_size=9000), max_size=5))
def test_sections_are_the_text(chunks: list[str]) -> None:
    parts = list(sections(chunks, 8192))
    assert "".join(parts) == "".join(chunks)
    assert all(0 < len(part) <= 8192 for part in parts)


def test_sections_end_with_paragraphs_lines_or_words() -> None:
    paragraph = "word " * 300 + "\n\n"
    assert all(part.endswith("\n\n") for part in sections([paragraph * 40], 8192))
    assert all(part.endswith("\n") for part in sections(["line of text\n" * 4000], 8192))
    assert all(part.endswith(" ") for part in sections(["word " * 9000], 8192))
    assert [len(part) for part in sections(["x" * 20000], 8192)] == [8192, 8192, 3616]
