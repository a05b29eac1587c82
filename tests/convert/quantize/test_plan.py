from __future__ import annotations

import numpy as np
import pytest

from inferencex.convert.quantize import TensorPlan, TensorScheme, WeightInfo, parse_scheme, plan_quantization
from inferencex.convert.quantize.rtn import quantize_weight
from inferencex.formats.errors import OptionError, QuantizationError
from inferencex.formats.packing import PER_CHANNEL

EMBEDDING = WeightInfo("model.embed_tokens.weight", (1000, 576), "embedding")
TIED_HEAD = WeightInfo("lm_head.weight", (1000, 576), "head", tied_to="model.embed_tokens.weight")
HEAD = WeightInfo("lm_head.weight", (1000, 576), "head")
LINEARS = [
    WeightInfo("model.layers.0.self_attn.q_proj.weight", (576, 576)),
    WeightInfo("model.layers.0.mlp.down_proj.weight", (576, 1536)),
    WeightInfo("model.layers.0.odd.weight", (64, 172)),
]
INT8 = TensorScheme("int8", PER_CHANNEL, True)


def by_name(plans: list[TensorPlan]) -> dict[str, TensorPlan]:
    return {plan.name: plan for plan in plans}


def test_every_weight_has_a_plan_in_order() -> None:
    weights = [EMBEDDING, *LINEARS, TIED_HEAD]
    plans = plan_quantization(weights, parse_scheme("rtn-int4"))
    assert [plan.name for plan in plans] == [weight.name for weight in weights]


@pytest.mark.parametrize(
    ("group_size", "channels", "ragged", "words"),
    [
        (128, 576, 64, "576 input channels make 5 groups, the last of 64"),
        (64, 172, 44, "172 input channels make 3 groups, the last of 44"),
        (64, 576, 0, "--quantization rtn-int4-g64"),
        (1024, 576, 0, "one group: 576 input channels are fewer than the group size of 1024"),
    ],
)
def test_group_sizes_that_do_not_divide_are_said(group_size: int, channels: int, ragged: int, words: str) -> None:
    (plan,) = plan_quantization([WeightInfo("w", (8, channels))], parse_scheme("rtn-int4", group_size=group_size))
    assert plan.scheme is not None
    assert plan.ragged == ragged
    assert words in plan.reason
    assert plan.scheme.group_size == min(group_size, channels)
    assert words in str(plan)


def test_none_leaves_everything_plain() -> None:
    for plan in plan_quantization([EMBEDDING, *LINEARS, TIED_HEAD], parse_scheme("none")):
        assert plan.scheme is None
        assert plan.method == "none"


def test_plain_linears_with_a_quantized_head() -> None:
    plans = by_name(plan_quantization([EMBEDDING, *LINEARS, HEAD], parse_scheme("none", lm_head="int8")))
    assert plans["lm_head.weight"].scheme == INT8
    assert plans["lm_head.weight"].method == "rtn"
    assert plans[EMBEDDING.name].scheme is None


@pytest.mark.parametrize(
    ("lm_head", "embedding", "expected"),
    [
        (None, None, None),
        ("int8", None, INT8),
        (None, "int8", INT8),
        ("int8", "int8", INT8),
        ("none", None, None),
        ("none", "none", None),
    ],
)
def test_tied_weights_stay_one_tensor(
    lm_head: str | None, embedding: str | None, expected: TensorScheme | None
) -> None:
    scheme = parse_scheme("rtn-int4", lm_head=lm_head, embedding=embedding)
    plans = by_name(plan_quantization([EMBEDDING, *LINEARS, TIED_HEAD], scheme))
    head, table = plans["lm_head.weight"], plans[EMBEDDING.name]
    assert head.scheme == table.scheme == expected
    assert head.stored_as == table.stored_as == EMBEDDING.name
    assert table.is_stored
    assert not head.is_stored
    assert head.stored_bytes(2) == 0


@pytest.mark.parametrize(("lm_head", "embedding"), [("int8", "int4"), ("int8", "none"), ("none", "int4")])
def test_tied_weights_cannot_have_two_formats(lm_head: str, embedding: str) -> None:
    scheme = parse_scheme("rtn-int4", lm_head=lm_head, embedding=embedding)
    with pytest.raises(OptionError, match=r"one tensor .* cannot have two formats"):
        plan_quantization([EMBEDDING, TIED_HEAD], scheme)
    plans = by_name(plan_quantization([EMBEDDING, HEAD], scheme))
    assert plans[EMBEDDING.name].scheme != plans["lm_head.weight"].scheme


def test_tied_to_something_that_is_not_there() -> None:
    with pytest.raises(QuantizationError, match=r"tied to model\.embed_tokens\.weight"):
        plan_quantization([TIED_HEAD], parse_scheme("none"))
    with pytest.raises(QuantizationError, match="with that shape"):
        plan_quantization([EMBEDDING, WeightInfo("h", (7, 7), "head", EMBEDDING.name)], parse_scheme("none"))


def test_excluded_weights_stay_plain() -> None:
    scheme = parse_scheme("rtn-int4", embedding="int8", exclude=["*.mlp.*", "lm_head.weight"])
    plans = by_name(plan_quantization([EMBEDDING, *LINEARS, TIED_HEAD], scheme))
    assert plans["model.layers.0.mlp.down_proj.weight"].scheme is None
    assert "--exclude '*.mlp.*'" in plans["model.layers.0.mlp.down_proj.weight"].reason
    assert plans["model.layers.0.self_attn.q_proj.weight"].scheme is not None
    assert plans[EMBEDDING.name].scheme is None, "excluding the head excludes the tensor it shares"


def test_exclude_patterns_must_match() -> None:
    scheme = parse_scheme("rtn-int4", exclude=["model.layers.0.mlp.down_prj.weight"])
    with pytest.raises(OptionError, match=r"none of the 3 weights .* 'model\.layers\.0\.mlp\.down_proj\.weight'"):
        plan_quantization(LINEARS, scheme)


def test_routers_stay_plain() -> None:
    (plan,) = plan_quantization([WeightInfo("gate", (8, 576), "router")], parse_scheme("rtn-int4"))
    assert plan.scheme is None
    assert "router" in plan.reason


def test_experts_per_channel_become_one_block_a_row() -> None:
    experts = WeightInfo("experts.down", (4, 64, 128), "experts")
    (plan,) = plan_quantization([experts], parse_scheme("rtn-int8"))
    assert plan.scheme == TensorScheme("int8", 128, True)
    (plan,) = plan_quantization([experts], parse_scheme("rtn-int4"))
    assert plan.scheme == TensorScheme("int4", 64, False)


def test_shapes_that_do_not_go_with_the_role() -> None:
    with pytest.raises(QuantizationError, match=r"conv: .* expected 2 dimensions .*--exclude 'conv'"):
        plan_quantization([WeightInfo("conv", (8, 1, 4))], parse_scheme("rtn-int4"))
    (plan,) = plan_quantization([WeightInfo("empty", (8, 0))], parse_scheme("rtn-int4"))
    assert plan.scheme is None


_INTEGERS = ("rtn-int3", "rtn-int4", "rtn-int5", "rtn-int6", "rtn-int8", "rtn-int4-g128")


@pytest.mark.parametrize(
    ("name", "symmetric"),
    [
        *((name, symmetric) for name in _INTEGERS for symmetric in (0, 1)),
        *((name, 1) for name in ("fp8", "fp8-weight", "rtn-fp8-g64", "int8-dynamic", "nvfp4", "mxfp4")),
    ],
)
def test_planned_bytes_are_enough(name: str, symmetric: int) -> None:
    info = WeightInfo("w", (33, 172))
    (plan,) = plan_quantization([info], parse_scheme(name, symmetric=bool(symmetric)))
    assert plan.scheme is not None
    weight = np.random.default_rng(0).standard_normal(info.shape).astype(np.float32)
    assert quantize_weight("w", weight, plan.scheme).tensor.nbytes <= plan.stored_bytes(2) <= 33 * 172 * 2


@pytest.mark.parametrize("name", ["fp8", "int8-dynamic"])
def test_activations_of_linears_only(name: str) -> None:
    """What an expert's second linear reads is inside of an operator, and heads and embeddings are said apart."""
    infos = [
        WeightInfo("linear", (8, 64)),
        WeightInfo("experts", (2, 8, 64), "experts"),
        WeightInfo("head", (100, 64), "head"),
    ]
    kind = "fp8" if name == "fp8" else "int8"
    linear, experts, head = plan_quantization(infos, parse_scheme(name, lm_head=kind))
    assert linear.scheme is not None and linear.scheme.activation is not None
    assert experts.scheme is not None and experts.scheme.activation is None
    assert "weights only" in experts.reason
    assert head.scheme is not None and head.scheme.activation is None
