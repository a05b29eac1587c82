"""What of a model a rank may hold more of than its share, and why: everything else has to be divided."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path

from inferencex.formats.bundle import Bundle
from inferencex.runtime.parallel.plan import plan_graph
from inferencex.runtime.parallel.roles import Weight
from tests.runtime.parallel.ranks import EVERYTHING

ANYWHERE: Mapping[str, str] = {
    "*.mlp.gate.weight": "chooses experts: every rank has to know all of the choice",
    "*.mlp.router.weight": "chooses experts",
    "*.mlp.router.gate.weight": "chooses experts",
    "*.router.proj.weight": "chooses experts",
    "*.shared_expert_gate.weight": "one number for each token",
    "*.self_attn.q_a_proj.weight": "of low rank, with a norm over all of it",
    "*.self_attn.kv_a_proj_with_mqa.weight": "of low rank, with a norm over all of it; all heads share its last part",
    "model.per_layer_model_projection.weight": "every layer reads a part of it, with norms over all of that",
}

IN_FAMILY: Mapping[str, Mapping[str, str]] = {
    "differential-attention": {"*.self_attn.*": "both halves of the values are read by every head"},
    "keys-are-values-moe": {"*.self_attn.*": "some layers have one key-value head, which every rank needs"},
    "kv-sharing-altup": {
        "*.altup_*projections.*": "one square matrix, with a norm over all of its result",
        "*.layers.0.mlp.gate_proj.weight": "the largest of all its results are kept",
    },
    "learned-positions-post-norm": {"*.project_*": "one matrix in front of all layers and one behind, without a pair"},
    "mqa": {"*.self_attn.*": "one key-value head, which every rank needs"},
    "mqa-packed-learned-positions": {"*.attn.c_attn.weight": "one key-value head, which every rank needs"},
    "parallel-blocks-multi-query": {"*.query_key_value.weight": "one key-value head, which every rank needs"},
    "qk-norm-over-all-heads": {"*.self_attn.*": "queries and keys are normalized over all heads together"},
    "sliding-three-of-four": {"*.self_attn.*": "queries and keys are normalized over all heads together"},
}


def undivided(bundle: Path, family: str) -> list[str]:
    """Return the weights of which a rank of two holds more than half, without a reason above."""
    plan = plan_graph(Bundle.open(bundle).graph, 2, EVERYTHING)
    assert plan.summed, "nothing is divided"
    known = [*ANYWHERE, *IN_FAMILY.get(family, {})]
    return [weight.name for weight in plan.weights if _is_large(weight) and not _matches(weight.name, known)]


def _is_large(weight: Weight) -> bool:
    return weight.held * 2 > weight.nbytes


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(name.split("+")[0], pattern) for pattern in patterns)
