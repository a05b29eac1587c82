"""The soak in short; `make soak` is the long form."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="needs the extra inferencex[serve]")

from tests.soak.run import report, soak, terminate
from tests.soak.tally import Outcome

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")


def test_nothing_is_lost_and_nothing_is_left(tiny_chat_bundle: Path, tmp_path: Path) -> None:
    soaked = soak(tiny_chat_bundle, tmp_path, num_clients=30, seconds=6.0)
    print("\n".join(report(soaked)))
    soaked.check()
    # Little is done in this time on a machine that does much else; but some of everything.
    assert soaked.swaps >= 2 and soaked.health.probes > 5
    for outcome in Outcome:
        assert soaked.tally.total(outcome) > 5, outcome


def test_a_signal_under_load_loses_nothing(tiny_chat_bundle: Path, tmp_path: Path) -> None:
    tally = terminate(tiny_chat_bundle, tmp_path, num_clients=30, seconds=2.0)
    tally.check()
    assert tally.refused > 0 and tally.total(Outcome.OK) > 5
