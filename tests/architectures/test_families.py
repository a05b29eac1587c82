"""Every architectural feature survives capture, passes and every backend, on ragged batches."""

from __future__ import annotations

import pytest
import torch

from tests.architectures.comparison import TOLERANCE, largest_errors
from tests.architectures.families import FAMILIES, Family


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.id)
def test_ragged_batch_equals_each_sequence_alone(family: Family) -> None:
    errors = largest_errors(family.name, **family.overrides)
    assert {way: error for way, error in errors.items() if not error < TOLERANCE} == {}
