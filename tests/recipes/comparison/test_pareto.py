"""Plots: which points are on the front, and documents that any reader of XML takes."""

from __future__ import annotations

import math
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from inferencex.recipes.comparison.output import plots_of
from inferencex.recipes.comparison.pareto import Point, front, plot
from inferencex.recipes.comparison.rows import Row, cells, markdown
from inferencex.recipes.comparison.speed import Speed

SVG = "{http://www.w3.org/2000/svg}"
POINTS = st.lists(st.builds(Point, st.just("x"), st.floats(0.1, 9.0), st.floats(0.0, 2.0)), max_size=9)


@given(POINTS, st.booleans())
def test_nothing_on_the_front_is_beaten(points: list[Point], more: bool) -> None:
    best = front(points, more)
    sign = -1.0 if more else 1.0

    def beaten(point: Point) -> bool:
        return any(
            sign * other.x <= sign * point.x
            and other.loss <= point.loss
            and (other.x, other.loss) != (point.x, point.loss)
            for other in points
        )

    assert {(p.x, p.loss) for p in best} == {(p.x, p.loss) for p in points if not beaten(p)}


@given(POINTS)
def test_every_point_is_drawn_inside(points: list[Point]) -> None:
    root = ElementTree.fromstring(plot("a < b", points, "MB", "mean KL & more"))
    circles = [circle for circle in root.iter(f"{SVG}circle") if circle.find(f"{SVG}title") is not None]
    assert len(circles) == len(points)
    for circle in circles:
        assert 0 <= float(circle.get("cx", "-1")) <= 820 and 0 <= float(circle.get("cy", "-1")) <= float(
            root.get("height", "0")
        )


def test_points_without_numbers_are_left_out() -> None:
    root = ElementTree.fromstring(plot("t", [Point("a", 1.0, math.nan), Point("b", 2.0, 0.1)], "MB", "KL"))
    assert len([circle for circle in root.iter(f"{SVG}circle") if circle.find(f"{SVG}title") is not None]) == 1


def test_tables_show_only_what_was_measured() -> None:
    rows = [Row("a", 2_000_000, scores={"piqa": 0.5}), Row("b", 1_000_000, scores={"piqa": 0.25}, passed=False)]
    assert cells(rows) == (
        ["bundle", "MB", "piqa", "thresholds"],
        [["a", "2.0", "0.5000", ""], ["b", "1.0", "0.2500", "missed"]],
    )
    assert "| b | 1.0 | 0.2500 | missed |" in markdown(rows, [])
    assert list(plots_of(rows).values()) == [None, None]
    fast = [Row("a", 1, mean_kl=0.1, speed=Speed(10.0, 5.0, 8, 4))]
    assert None not in plots_of(fast).values()
