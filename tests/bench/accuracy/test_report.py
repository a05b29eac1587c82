from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from bench.accuracy.plot import scatter
from bench.accuracy.report import comparisons, figure, markdown, notes
from bench.accuracy.results import Run
from bench.accuracy.tools import OURS
from tests.bench.accuracy.test_results import finding, run


@pytest.fixture
def measured() -> Run:
    return run(
        finding(OURS, "int4", bits=4.3125, mean_kl=0.1, seconds=100.0),
        finding("autoround", "iterations-50", bits=4.3125, mean_kl=0.12, seconds=787.0),
        finding(OURS, "fp8", bits=8.0, floats=True, mean_kl=0.015),
    )


def test_ours_is_set_beside_the_best_peer(measured: Run) -> None:
    integers, floats = comparisons(measured)
    assert integers == [
        "int4 scheme",
        "4.31",
        "0.100",
        "autoround, iterations-50 scheme",
        "4.31",
        "0.120",
        "1.20x",
        "7.87x",
    ]
    assert floats[3:] == ["–"] * 5


@pytest.mark.parametrize(("value", "text"), [(0.4466, "0.447"), (0.0321, "0.0321"), (0.00213, "0.00213")])
def test_divergences_have_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_the_page_says_how_it_came_about(measured: Run) -> None:
    measured.skipped["nncf"] = "it is not installed"
    measured.failures["inferencex/5.5-bits"] = "out of memory"
    page = markdown(measured, "accuracy.svg")
    facts = ("python -m bench.accuracy", "a machine", "2030-01-02", "threads 2", "29.446", "(accuracy.svg)")
    assert all(fact in page for fact in (*facts, "nncf was left out: it is", "5.5-bits did not finish: out of"))
    assert len(notes(measured)) == 5


def test_tables_are_whole(measured: Run) -> None:
    tables = re.findall(r"(?:^\|.*\|\n)+", markdown(measured, "accuracy.svg"), re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert tables[0].count(f"| **{OURS}** |") == 2


def test_the_plot_is_to_scale(measured: Run) -> None:
    root = ElementTree.fromstring(scatter("A <title> & more", measured.ordered()))
    circles = [node for node in root.iter("{http://www.w3.org/2000/svg}circle") if len(node)]
    assert len(circles) == 3
    best, worst, fp8 = (tuple(float(node.get(at, "")) for at in ("cx", "cy")) for node in circles)
    assert best[0] == worst[0] < fp8[0]
    assert worst[1] < best[1] < fp8[1]  # the larger the divergence, the higher
    assert [node.get("class") for node in circles] == ["ours", "peer", "ours"]


def test_a_plot_of_nothing_is_still_a_picture() -> None:
    ElementTree.fromstring(scatter("nothing", []))
    ElementTree.fromstring(scatter("no divergence", [finding(mean_kl=0.0)]))
