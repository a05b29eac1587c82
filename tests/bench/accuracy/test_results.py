from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.accuracy.results import Finding, Run, best_peer, chosen_rows
from bench.accuracy.tools import OURS

KNOWN = {OURS: ["int4", "fp8"], "autoround": ["iterations-0", "iterations-50"], "nncf": ["awq"]}


def finding(tool: str = "nncf", row: str = "awq", **changes: object) -> Finding:
    base = Finding(
        tool, row, f"{row} scheme", "float32", False, "1.0", 4.3, 33.0, 0.2, 1.1, 0.77, 250.0, 480.0, 2_000_000_000
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def run(*findings: Finding) -> Run:
    return Run(
        model="a model",
        date="2030-01-02",
        command="python -m bench.accuracy",
        machine="a machine",
        software="Python 3",
        settings={"threads": 2},
        source_perplexity=29.446,
        findings={f"{found.tool}/{found.row}": found for found in findings},
    )


def test_a_run_survives_its_file(tmp_path: Path) -> None:
    before = run(finding(), finding(OURS, "int4"))
    before.skipped["autoround"] = "it is not installed"
    before.failures["inferencex/fp8"] = "out of memory"
    before.save(tmp_path / "results.json")
    assert Run.load(tmp_path / "results.json") == before
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_the_best_peer_is_of_equal_bits() -> None:
    ours = finding(OURS, "int4", bits=4.3125)
    larger = finding(row="larger", bits=4.5, mean_kl=0.01)
    smaller = finding(row="smaller", bits=4.25, mean_kl=0.26)
    equal = finding(row="equal", bits=4.35, mean_kl=0.17)
    assert best_peer(ours, [ours, larger, smaller, equal]) == equal
    assert best_peer(replace(ours, bits=5.5), [ours, larger, smaller, equal]) == larger
    assert best_peer(replace(ours, bits=4.0), [ours, larger, smaller, equal]) is None


def test_the_best_peer_quantizes_the_same_things() -> None:
    weights = finding(row="w8", bits=8.0, mean_kl=0.002)
    both = finding(row="w8a8", bits=8.0, mean_kl=0.017, activations="int8")
    floats = finding(row="fp8", bits=8.0, mean_kl=0.0001, floats=True)
    peers = [weights, both, floats]
    assert best_peer(finding(OURS, bits=8.0), peers) == weights
    assert best_peer(finding(OURS, bits=8.0, activations="int8"), peers) == both
    assert best_peer(finding(OURS, bits=8.0, floats=True), peers) == floats
    assert best_peer(finding(OURS, bits=8.0, floats=True, activations="fp8"), peers) is None


def test_rows_are_ordered_by_what_is_comparable_and_then_by_kl() -> None:
    rows = [
        finding(row="a", activations="int8", bits=8.0, mean_kl=0.01),
        finding(row="b", bits=8.0, mean_kl=0.002),
        finding(row="c", bits=4.25, mean_kl=0.3),
        finding(row="d", bits=4.31, mean_kl=0.1),
    ]
    assert [found.row for found in run(*rows).ordered()] == ["d", "c", "b", "a"]


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (None, KNOWN),
        ("ours,autoround", {OURS: KNOWN[OURS], "autoround": KNOWN["autoround"]}),
        ("nncf, inferencex/fp8", {OURS: ["fp8"], "nncf": ["awq"]}),
        ("autoround/iterations-50,autoround/iterations-0", {"autoround": ["iterations-0", "iterations-50"]}),
    ],
)
def test_rows_are_chosen_by_tool_or_by_name(only: str | None, expected: dict[str, list[str]]) -> None:
    assert chosen_rows(only, KNOWN) == expected


@pytest.mark.parametrize("only", ["auto-round", "nncf/gptq", "ours/int3"])
def test_what_there_is_none_of_is_named(only: str) -> None:
    with pytest.raises(ValueError, match=f"'{only}' is not one of"):
        chosen_rows(only, KNOWN)
