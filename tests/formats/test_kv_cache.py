"""Scales of keys and values, as attributes of nodes say them."""

from __future__ import annotations

from typing import Any

import pytest

from inferencex.formats.errors import BundleError
from inferencex.formats.kv_cache import KVScales, kv_scales, kv_scales_by_layer

INT8: dict[str, Any] = {"num_kv_heads": 2, "kv_type": 3, "key_scales": [0.5, 1.0], "value_scales": [0.25, 2.0]}
NONE: dict[str, Any] = {"num_kv_heads": 2}


def test_scales_are_read() -> None:
    assert kv_scales(INT8, "a") == KVScales("int8", (0.5, 1.0), (0.25, 2.0))
    assert kv_scales(INT8 | {"kv_type": 17}, "a") == KVScales("fp8", (0.5, 1.0), (0.25, 2.0))
    assert kv_scales(NONE, "a") is None and kv_scales(NONE | {"kv_type": 0, "key_scales": None}, "a") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_type": 0}, "attention 'a' has key_scales and no kv_type"),
        ({"kv_type": 1}, "kv_type is 1, expected 3 or 17, or 0"),
        ({"key_scales": [1.0]}, "has 1 key_scales for 2 key-value heads"),
        ({"value_scales": ()}, "has 0 value_scales for 2"),
        ({"value_scales": [1.0, 0.0]}, "expected positive numbers"),
        ({"key_scales": [float("nan"), 1.0]}, "expected positive numbers"),
        ({"key_scales": [float("inf"), 1.0]}, "expected positive numbers"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        kv_scales(INT8 | changes, "a")


def test_a_graph_says_the_same_everywhere() -> None:
    assert kv_scales_by_layer([(0, INT8, "a"), (1, INT8, "b"), (1, INT8, "c")]).keys() == {0, 1}
    assert kv_scales_by_layer([(0, NONE, "a"), (1, NONE, "b")]) == {}
    with pytest.raises(BundleError, match="'b' has other scales for keys and values than what shares layer 0"):
        kv_scales_by_layer([(0, INT8, "a"), (0, INT8 | {"key_scales": [1.0, 1.0]}, "b")])
    with pytest.raises(BundleError, match="in different formats: int8, none"):
        kv_scales_by_layer([(0, INT8, "a"), (1, NONE, "b")])
    with pytest.raises(BundleError, match="in different formats: fp8, int8"):
        kv_scales_by_layer([(0, INT8, "a"), (1, INT8 | {"kv_type": 17}, "b")])
