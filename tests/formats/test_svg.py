from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencex.formats.svg import opening, round_step


@given(span=st.floats(1e-300, 1e300), most=st.integers(1, 12))
def test_steps_are_round_and_not_too_many(span: float, most: int) -> None:
    step = round_step(span, most)
    assert span / step <= most * (1 + 1e-6)
    assert f"{step:.6e}"[:8] in ("1.000000", "2.000000", "5.000000")
    assert span / step > most / 2.6 or most == 1, "no fewer than they need be"


@pytest.mark.parametrize("span", [0.0, -1.0, 5e-324])
def test_there_is_a_step_without_a_span(span: float) -> None:
    assert round_step(span, 4) == 1.0


def test_a_document_begins_with_its_title_and_both_schemes() -> None:
    lines = [*opening('a <b> & "c"', 30, 20, ".x { fill: red }", ".x { fill: blue }"), "</svg>"]
    root = ElementTree.fromstring("\n".join(lines))
    assert root.get("aria-label") == 'a <b> & "c"' and root.get("viewBox") == "0 0 30 20"
    light, dark = "\n".join(lines).split("prefers-color-scheme: dark")
    assert ".x { fill: red }" in light and ".x { fill: blue }" in dark and "#0d1117" in dark
