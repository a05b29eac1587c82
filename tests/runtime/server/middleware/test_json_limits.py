from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencex.runtime.server.errors import InvalidRequest
from inferencex.runtime.server.middleware.json_limits import check_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(VALUES, st.booleans())
def test_depth_is_that_of_the_value_whatever_is_in_its_texts(value: object, ascii_only: bool) -> None:
    try:
        body = json.dumps(value, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    depth = depth_of(value)
    check_json(body, max(depth, 1))
    if depth > 1:
        with pytest.raises(InvalidRequest, match=f"deeper than the {depth - 1} levels"):
            check_json(body, depth - 1)


@pytest.mark.parametrize("body", [b"[" * 1_000_000, b'{"a":' * 500_000, b"[" * 65 + b"]" * 65])
def test_deep_nesting_is_refused_before_it_is_parsed(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="nested deeper than the 64 levels"):
        check_json(body, 64)


@pytest.mark.parametrize("part", [b'{"role": "user"}', b"[1]", b'"a"', b"{}"])
def test_a_body_of_very_many_parts_is_refused_before_it_is_parsed(part: bytes) -> None:
    check_json(b"[" + b",".join([part] * 10_000) + b"]", 64)
    with pytest.raises(InvalidRequest, match=r"more strings, objects and lists than this server takes \(50000\)"):
        check_json(b"[" + b",".join([part] * 100_000) + b"]", 64)


def test_long_texts_and_many_numbers_are_few_parts() -> None:
    check_json(b'{"prompt": "' + b"[{," * 300_000 + b'"}', 64)
    check_json(b'{"prompt": [' + b",".join([b"17"] * 300_000) + b"]}", 64)


@pytest.mark.parametrize("body", [b"\xff", b'{"a": "\xc3"}', b"\xed\xa0\xbd", '{"a": 1}'.encode("utf-16")])
def test_what_is_not_utf8_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        check_json(body, 64)


@pytest.mark.parametrize("text", [r"\ud83d", r"\uDE00", r"\ud83d\ud83d", r"\ude00\ud83d"])
def test_half_a_character_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        check_json(f'{{"a": ["{text}"]}}'.encode(), 64)


@pytest.mark.parametrize(
    "body", [rb'{"a": "\ud83d\ude00"}', rb'{"a": "\\ud83d"}', b'"unended [[[[[', b"not json", b'{"a": "\\']
)
def test_what_is_for_the_parser_to_judge_passes(body: bytes) -> None:
    check_json(body, 1)
