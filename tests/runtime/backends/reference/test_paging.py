"""A token's result depends on its own sequence: not on blocks, on chunks, or on what else is in the step."""

from __future__ import annotations

import resource
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from inferencex.formats import dialect
from inferencex.runtime.backends.base import Float32Array
from inferencex.runtime.backends.reference.attention import PagedKV
from tests.runtime.backends.reference import steps
from tests.runtime.backends.reference.steps import GROUPS, HEADS, KEY_DIM, VALUE_DIM, Chunk, Model

WIDTH = HEADS * VALUE_DIM
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "chunk": {"chunk": 4},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "alibi": {"slopes": True},
    "all": {"window": 5, "softcap": 2.0, "sinks": True, "slopes": True},
    "fp8": {"kv_type": 17, "key_scales": [2.0**-7, 2.0**-8], "value_scales": [2.0**-8, 2.0**-7]},
}


def _model(sinks: bool = False, slopes: bool = False, **attributes: Any) -> ir.Model:
    m = Model()
    extra = [m.weight(HEADS) if sinks else None, m.weight(HEADS) if slopes else None]
    return m.finish(m.attention(0, *m.keys(), *extra, **attributes), WIDTH)


def _whole(model: ir.Model, tokens: list[int]) -> Float32Array:
    """What `onnx.reference` computes for a whole sequence: no pages, no steps."""
    feeds = {
        "token_ids": np.array(tokens),
        "positions": np.arange(len(tokens)),
        "logit_rows": np.arange(len(tokens)),
    }
    evaluator = ReferenceEvaluator(ir.serde.serialize_model(model), new_ops=dialect.new_ops())
    (logits,) = evaluator.run(None, feeds)
    return np.asarray(logits, dtype=np.float32)


@pytest.mark.parametrize("way", steps.WAYS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_paged_chunks_equal_a_whole_sequence(variant: str, way: str) -> None:
    model = _model(**VARIANTS[variant])
    sequences = steps.random_sequences(19)
    blocks = steps.tables([19], seed=3)
    executable = steps.compiled_as(way, model)
    parts = [
        executable.step(steps.batch([(0, first, size)], sequences, blocks))
        for first, size in ((0, 6), (6, 1), (7, 1), (8, 8), (16, 3))
    ]
    np.testing.assert_allclose(np.concatenate(parts), _whole(model, sequences[0]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sinks", [False, True])
def test_int8_pages_hold_what_the_dialect_says(sinks: bool) -> None:
    model = _model(sinks=sinks, kv_type=3, key_scales=[0.013, 0.02], value_scales=[0.021, 0.011])
    sequences, blocks = steps.random_sequences(11), steps.tables([11], seed=3)
    executable = steps.compiled(model)
    parts = [executable.step(steps.batch([(0, at, size)], sequences, blocks)) for at, size in ((0, 6), (6, 5))]
    kept = np.concatenate(parts)
    np.testing.assert_allclose(kept, _whole(model, sequences[0]), atol=1e-5, rtol=1e-5)
    assert np.abs(kept - _whole(_model(sinks=sinks), sequences[0])).max() > 1e-3


@pytest.mark.parametrize("way", steps.WAYS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_ragged_batch_equals_each_sequence_alone(variant: str, way: str) -> None:
    sequences = steps.random_sequences(9, 1, 14)
    blocks = steps.tables([9, 1, 14], seed=1)
    model = _model(**VARIANTS[variant])
    together = steps.compiled_as(way, model)
    together.step(steps.batch([(0, 0, 5), (2, 0, 7)], sequences, blocks))
    got = together.step(steps.batch([(2, 7, 7), (1, 0, 1), (0, 5, 4)], sequences, blocks))
    alone = []
    for sequence, first in ((2, 7), (1, 0), (0, 5)):
        executable = steps.compiled_as(way, model)
        if first:
            executable.step(steps.batch([(sequence, 0, first)], sequences, blocks))
        rest: Chunk = (sequence, first, len(sequences[sequence]) - first)
        alone.append(executable.step(steps.batch([rest], sequences, blocks)))
    if way == "reference":  # torch sums in an order that depends on the shapes
        np.testing.assert_allclose(got, np.concatenate(alone), atol=1e-6, rtol=1e-6)
    else:
        np.testing.assert_array_equal(got, np.concatenate(alone))


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    block_size=st.sampled_from([1, 2, 4, 7, 16]),
    length=st.integers(1, 15),
    way=st.sampled_from(steps.WAYS),
)
def test_any_cut_and_any_block_order(data: st.DataObject, block_size: int, length: int, way: str) -> None:
    sequences = steps.random_sequences(length)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(1, length), max_size=4))})
    blocks = steps.tables([length], block_size, seed=data.draw(st.integers(0, 99)))
    model = _model(window=6)
    executable = steps.compiled_as(way, model, block_size=block_size)
    parts = [
        executable.step(steps.batch([(0, first, last - first)], sequences, blocks)) for first, last in pairwise(cuts)
    ]
    np.testing.assert_allclose(np.concatenate(parts), _whole(model, sequences[0]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", steps.WAYS)
def test_blocks_are_reused_unwiped(way: str) -> None:
    """What another sequence left in a block is never read."""
    model = _model()
    sequences = steps.random_sequences(12, 6)
    executable = steps.compiled_as(way, model, num_blocks=3)
    executable.step(steps.batch([(0, 0, 12)], sequences, [[0, 1, 2], []]))
    got = executable.step(steps.batch([(1, 0, 6)], sequences, [[], [2, 0]]))
    np.testing.assert_allclose(got, _whole(model, sequences[1]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", steps.WAYS)
def test_a_shared_prefix_is_computed_once(way: str) -> None:
    model = _model()
    first, second = steps.random_sequences(10, 10)
    second[:8] = first[:8]
    executable = steps.compiled_as(way, model)
    executable.step(steps.batch([(0, 0, 10)], [first, second], [[5, 2, 7], []]))
    got = executable.step(steps.batch([(1, 8, 2)], [first, second], [[], [5, 2, 9]]))
    np.testing.assert_allclose(got, _whole(model, second)[8:], atol=1e-5, rtol=1e-5)
    again = executable.step(steps.batch([(0, 9, 1)], [first, second], [[5, 2, 7], []]))
    np.testing.assert_allclose(again, _whole(model, first)[9:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", steps.WAYS)
def test_only_the_rows_that_are_asked_for_come_back_in_order(way: str) -> None:
    model = _model()
    sequences = steps.random_sequences(9)
    got = steps.compiled_as(way, model).step(steps.batch([(0, 0, 9)], sequences, steps.tables([9]), rows=[2, 8]))
    np.testing.assert_allclose(got, _whole(model, sequences[0])[[2, 8]], atol=1e-5, rtol=1e-5)
    assert got.dtype == np.float32 and got.flags.c_contiguous


@pytest.mark.parametrize("way", steps.WAYS)
def test_layers_keep_apart_and_readers_share(way: str) -> None:
    """Layer 1 has its own state; the last node reads the state that layer 0 wrote, earlier steps included."""
    m = Model()
    k, v = m.keys()
    first = m.attention(0, k, v)
    own = m.attention(1, *m.keys())
    reader = m.attention(0, k, v, writes=0, window=4)
    total = m.node("Add", m.node("Add", first, own, shape=["tokens", WIDTH]), reader, shape=["tokens", WIDTH])
    model = m.finish(total, WIDTH)
    sequences = steps.random_sequences(13)
    executable = steps.compiled_as(way, model)
    assert executable.facts.num_layers == 2
    assert executable.facts.bytes_per_token == 2 * 4 * GROUPS * (KEY_DIM + VALUE_DIM)
    blocks = steps.tables([13], seed=5)
    parts = [executable.step(steps.batch([(0, a, n)], sequences, blocks)) for a, n in ((0, 5), (5, 7), (12, 1))]
    np.testing.assert_allclose(np.concatenate(parts), _whole(model, sequences[0]), atol=1e-5, rtol=1e-5)


def test_a_reader_does_not_write() -> None:
    """Its keys are what the writer was given; its own are not even looked at."""
    m = Model()
    k, v = m.keys()
    writer = m.attention(0, k, v)
    reader = m.attention(0, *m.keys(), writes=0)
    both = m.node("Concat", writer, reader, shape=["tokens", 2 * WIDTH], axis=1)
    executable = steps.compiled(m.finish(both, 2 * WIDTH))
    sequences = steps.random_sequences(8)
    for chunk in ((0, 0, 5), (0, 5, 3)):
        executable.step(steps.batch([chunk], sequences, [[1, 0]]))
    for value, pages in ((k, executable._state.layers[0].keys), (v, executable._state.layers[0].values)):
        node = value.producer()
        assert node is not None and node.inputs[0] is not None and node.inputs[0].const_value is not None
        given = node.inputs[0].const_value.numpy()[sequences[0]]
        np.testing.assert_array_equal(pages[[1, 0]].reshape(8, -1).numpy(), given)


def test_state_is_kept_in_the_pool_that_was_asked_for() -> None:
    executable = steps.compiled(_model(), num_blocks=5, block_size=8)
    assert (executable.num_blocks, executable.block_size) == (5, 8)
    sequences = steps.random_sequences(3)
    executable.step(steps.batch([(0, 0, 3)], sequences, [[4]]))
    assert executable._state.layers[0].keys.shape == (5, 8, GROUPS, KEY_DIM)
    assert executable._state.layers[0].values.shape == (5, 8, GROUPS, VALUE_DIM)


def test_a_pool_takes_no_memory_before_it_is_written() -> None:
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        pytest.skip("the resident memory of a process is read from /proc")

    def resident() -> int:
        return int(statistics.read_text().split()[1]) * resource.getpagesize()

    before = resident()
    pages = PagedKV.allocate(num_blocks=8192, block_size=16, heads=8, key_dim=64, value_dim=64)
    reserved = 4 * (pages.keys.numel() + pages.values.numel())
    assert resident() - before < reserved / 8
