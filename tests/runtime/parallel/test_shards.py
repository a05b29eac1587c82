"""What all ranks compute together is what one computes, whatever weights are stored as."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import BackendError, BundleError, OptionError
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.parallel.bundle_shard import BundleShard
from inferencex.runtime.parallel.communicator import Unconnected
from inferencex.runtime.parallel.names import ALL_GATHER, ALL_REDUCE, PARALLEL_DOMAIN
from inferencex.runtime.parallel.plan import plan_graph
from inferencex.runtime.parallel.roles import PlanOptions, Role
from inferencex.runtime.parallel.shard import cut_graph
from tests.architectures.ragged import ragged_logits, random_sequences
from tests.runtime.parallel.conftest import OPTIONS, MakeBundle
from tests.runtime.parallel.ranks import EVERYTHING, Ranks

FLOAT = replace(OPTIONS, activation_dtype="float32", kv_cache_dtype="float32")
SEQUENCES = random_sequences(250)


def largest_difference(bundle: Path, ranks: Ranks) -> float:
    alone = ragged_logits(CpuBackend().compile(bundle, FLOAT), SEQUENCES)
    together = ragged_logits(ranks, SEQUENCES)
    return max(float(np.abs(one - other).max()) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    "quantization", ["rtn-int3-g16", "rtn-int4-g16", "rtn-int6-g16", "rtn-int8", "fp8-weight", "nvfp4", "mxfp4"]
)
def test_every_format_of_weights(make_bundle: MakeBundle, quantization: str) -> None:
    bundle = make_bundle("llama", quantization, intermediate_size=128)
    ranks = Ranks(bundle, 2, FLOAT)
    assert largest_difference(bundle, ranks) < 1e-4
    assert ranks.plan.whole_bytes == 0


@pytest.mark.parametrize("quantization", ["rtn-int5-g16", "mxfp4"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_are_divided_by_their_width(make_bundle: MakeBundle, name: str, quantization: str) -> None:
    bundle = make_bundle(name, quantization, intermediate_size=128)
    ranks = Ranks(bundle, 2, FLOAT)
    assert largest_difference(bundle, ranks) < 1e-4
    assert all(weight.held * 2 == weight.nbytes for weight in ranks.plan.weights if "experts" in weight.name)


@pytest.mark.parametrize("quantization", ["none", "rtn-int4-g32"])
def test_experts_whose_width_does_not_divide_are_divided_one_by_one(make_bundle: MakeBundle, quantization: str) -> None:
    bundle = make_bundle("mixtral", quantization, intermediate_size=96 if quantization != "none" else 97)
    ranks = Ranks(bundle, 2, FLOAT)
    assert list(ranks.plan.roles.values()).count(Role.SUM_BY_EXPERT) == 2
    assert largest_difference(bundle, ranks) < 1e-4


@pytest.mark.parametrize("quantization", ["int8-dynamic", "fp8"])
def test_rows_that_are_quantized_in_a_step_are_quantized_by_each_rank(
    make_bundle: MakeBundle, quantization: str
) -> None:
    """Which finds a scale for what it has of a row: as close to unquantized activations as one scale for all."""
    bundle = make_bundle("llama", quantization, intermediate_size=128)
    same_weights = {"int8-dynamic": "rtn-int8", "fp8": "fp8-weight"}[quantization]
    exact = make_bundle("llama", same_weights, intermediate_size=128)
    reference = ragged_logits(CpuBackend().compile(exact, FLOAT), SEQUENCES)
    alone = ragged_logits(CpuBackend().compile(bundle, FLOAT), SEQUENCES)
    together = ragged_logits(Ranks(bundle, 2, FLOAT), SEQUENCES)
    errors = [
        float(np.mean([np.abs(one - other).mean() for one, other in zip(found, reference, strict=True)]))
        for found in (alone, together)
    ]
    assert errors[1] < 1.2 * errors[0]


def test_heads_that_share_keys_are_on_several_ranks(make_bundle: MakeBundle) -> None:
    bundle = make_bundle("llama")
    ranks = Ranks(bundle, 4, FLOAT)
    assert largest_difference(bundle, ranks) < 1e-4
    heads = [node.attributes.get_int("num_kv_heads") for node in ranks.shards[0].graph if node.op_type == "Attention"]
    assert heads == [1, 1]


def test_calibrated_scales_are_cut_with_their_heads(make_bundle: MakeBundle, tmp_path: Path) -> None:
    bundle = _with_kv_scales(make_bundle("llama"), tmp_path)
    options = replace(FLOAT, kv_cache_dtype="auto")
    alone = ragged_logits(CpuBackend().compile(bundle, options), SEQUENCES)
    together = ragged_logits(Ranks(bundle, 2, options), SEQUENCES)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, other, atol=0.05)  # a key on the border of two integers may become either
    for ours, theirs in zip(ragged_logits(CpuBackend().compile(bundle, FLOAT), SEQUENCES), alone, strict=True):
        assert np.abs(ours - theirs).max() > 1e-3, "the scales are so fine that they change nothing"


def _with_kv_scales(source: Path, folder: Path) -> Path:
    """Return a bundle whose keys and values have a scale of their own for each head."""
    import json
    import shutil

    import onnx

    from inferencex.formats.bundle.layout import GRAPH_FILE, MANIFEST_FILE

    target = folder / "scaled"
    shutil.copytree(source, target)
    model = onnx.load_model(str(target / GRAPH_FILE), load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "Attention":
            for name, content in (("kv_type", 3), ("key_scales", [0.02, 0.05]), ("value_scales", [0.04, 0.03])):
                node.attribute.append(onnx.helper.make_attribute(name, content))
    (target / GRAPH_FILE).write_bytes(model.SerializeToString())
    manifest = json.loads((target / MANIFEST_FILE).read_text())
    manifest["files"][GRAPH_FILE]["size"] = (target / GRAPH_FILE).stat().st_size
    (target / MANIFEST_FILE).write_text(json.dumps(manifest))
    return target


def test_a_row_does_not_depend_on_others(make_bundle: MakeBundle) -> None:
    """Bit by bit, on ranks as on one."""
    bundle = make_bundle("mixtral", num_attention_heads=4)
    together = ragged_logits(Ranks(bundle, 2, FLOAT), SEQUENCES)
    for tokens, logits in zip(SEQUENCES, together, strict=True):
        (alone,) = ragged_logits(Ranks(bundle, 2, FLOAT), [tokens])
        np.testing.assert_array_equal(alone, logits)


def test_small_things_stay_whole(make_bundle: MakeBundle) -> None:
    bundle = Bundle.open(make_bundle("llama"))
    plan = plan_graph(bundle.graph, 2, PlanOptions(least_bytes=1 << 20, embedding_bytes=1 << 20))
    assert not plan.roles and plan.whole_bytes == plan.held_bytes
    assert any(line.startswith("whole: lm_head.weight") for line in plan.lines())
    shard = cut_graph(plan, 1)
    assert not [node for node in shard.graph if node.domain == PARALLEL_DOMAIN]
    assert shard.nbytes == sum(stored.nbytes for stored in bundle.stored.values())


def test_terms_are_added_once_for_a_sum_of_sums(make_bundle: MakeBundle) -> None:
    """Attention and feed-forward side by side, and experts beside one that is always used: one exchange for both."""
    for name, exchanges in (("gptj", 2), ("qwen2_moe", 4)):
        plan = plan_graph(Bundle.open(make_bundle(name)).graph, 2, PlanOptions(least_bytes=1))
        graph = cut_graph(plan, 0).graph
        assert [node.op_type for node in graph if node.domain == PARALLEL_DOMAIN].count(ALL_REDUCE) == exchanges


def test_a_bias_is_added_once(make_bundle: MakeBundle) -> None:
    plan = plan_graph(Bundle.open(make_bundle("starcoder2")).graph, 2, EVERYTHING)
    with_bias = [
        sum(node.op_type == "Gemm" and len(node.inputs) > 2 for node in cut_graph(plan, rank).graph)
        for rank in range(2)
    ]
    assert with_bias == [8, 4]


def test_a_head_that_does_not_divide_evenly(make_bundle: MakeBundle) -> None:
    bundle = make_bundle("llama", vocab_size=251)
    ranks = Ranks(bundle, 2, FLOAT)
    (gather,) = [node for node in ranks.shards[0].graph if node.op_type == ALL_GATHER]
    assert list(gather.attributes.get_ints("sizes")) == [125, 126]
    assert largest_difference(bundle, ranks) < 1e-4


@pytest.mark.parametrize(
    ("size", "overrides", "message"),
    [
        (3, {}, r"4 query heads and 2 key-value heads, .* 3; possible sizes are 1, 2, 4$"),
        (3, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 100},
         r"down_proj.weight' has 100 input features, .* possible sizes are 1$"),
        (65, {}, r"tensor_parallel_size=65; expected 1 to 64"),
        (0, {}, r"tensor_parallel_size=0; expected 1 to 64"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused(
    make_bundle: MakeBundle, size: int, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        plan_graph(Bundle.open(make_bundle("llama", **overrides)).graph, size, EVERYTHING)


def test_groups_are_not_cut_through(make_bundle: MakeBundle) -> None:
    graph = Bundle.open(make_bundle("llama", "rtn-int4-g32", intermediate_size=96)).graph
    with pytest.raises(OptionError, match=r"96 input features in groups of 32, which cannot be divided among 2"):
        plan_graph(graph, 2, EVERYTHING)


def test_plans_of_the_same_graph_are_equal_and_others_are_not(make_bundle: MakeBundle) -> None:
    graphs = [Bundle.open(make_bundle(name)).graph for name in ("llama", "llama", "qwen2")]
    plans = [plan_graph(graph, 2, EVERYTHING).digest() for graph in graphs]
    assert plans[0] == plans[1] != plans[2]
    assert plan_graph(graphs[0], 4, EVERYTHING).digest() != plans[0]


def test_a_part_is_no_bundle_to_run_alone(make_bundle: MakeBundle) -> None:
    bundle = Bundle.open(make_bundle("llama"))
    shard = BundleShard(bundle, cut_graph(plan_graph(bundle.graph, 2, EVERYTHING), 1))
    with pytest.raises(BackendError, match="rank 1 is not connected with the others"):
        Unconnected(1, 2).all_reduce(np.zeros(3, np.float32))
    from inferencex.runtime.backends.cpu.backend import compile_bundle

    with pytest.raises(BackendError, match="one rank's part of a model, and there are no other ranks here"):
        compile_bundle(shard, OPTIONS)
    with pytest.raises(BundleError, match="rank 1 has no tensor named 'absent'"):
        shard.tensor("absent")
