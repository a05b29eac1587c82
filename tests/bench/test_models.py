from __future__ import annotations

import pytest

from bench.models import MODELS


def test_smollm2_costs_what_its_shapes_say() -> None:
    model = MODELS["smollm2"]
    one_layer = 576 * 576 * 2 + 2 * 576 * 192 + 3 * 576 * 1536
    assert model.linear_weights == 30 * one_layer
    assert model.head_weights == 576 * 49152
    assert model.kv_bytes_per_token == 30 * 2 * 3 * 64 * 2
    assert model.weight_bytes == pytest.approx(30 * one_layer * (0.5 + 2.5 / 64) + 576 * 49152)


def test_the_other_model_has_a_billion_weights() -> None:
    model = MODELS["random-1b"]
    assert 1.2e9 < model.linear_weights + model.head_weights < 1.3e9
