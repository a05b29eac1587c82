"""Every architectural feature survives capture, passes, every backend and a division among ranks, on ragged batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.architectures.comparison import TOLERANCE, largest_errors
from tests.architectures.families import FAMILIES, Family
from tests.runtime.parallel.division import undivided


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.id)
def test_ragged_batch_equals_each_sequence_alone(family: Family) -> None:
    def look(bundle: Path) -> None:
        assert undivided(bundle, family.id) == [], "a rank holds more of them than its share, for no known reason"

    errors = largest_errors(family.name, look=look, **family.overrides)
    assert {way: error for way, error in errors.items() if not error < TOLERANCE} == {}
