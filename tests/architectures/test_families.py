"""Every architectural feature survives capture, passes and the reference backend, on ragged batches."""

from __future__ import annotations

import pytest
import torch

from tests.architectures.comparison import TOLERANCE, largest_error
from tests.architectures.families import FAMILIES, Family


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.id)
def test_ragged_batch_equals_each_sequence_alone(family: Family) -> None:
    assert largest_error(family.name, **family.overrides) < TOLERANCE
