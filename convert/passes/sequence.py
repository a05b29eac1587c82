"""The order in which the passes run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from inferencex.convert.capture import Captured
from inferencex.convert.passes.experts import fuse_experts
from inferencex.convert.passes.gating import fuse_gated_activations
from inferencex.convert.passes.inline_attention import recognize_attention
from inferencex.convert.passes.linears import canonicalize_linears
from inferencex.convert.passes.masks import absorb_masks
from inferencex.convert.passes.naming import name_values
from inferencex.convert.passes.norms import fuse_norms
from inferencex.convert.passes.position_tables import check_position_tables
from inferencex.convert.passes.projections import merge_projections
from inferencex.convert.passes.residual import fuse_residual_norms
from inferencex.convert.passes.rope import fuse_rope
from inferencex.convert.passes.rope_angles import store_angles
from inferencex.convert.passes.rows import gather_rows_early
from inferencex.convert.passes.shapes import infer_shapes
from inferencex.convert.passes.simplify import simplify
from inferencex.convert.passes.tidying import remove_no_ops
from inferencex.convert.passes.token_major import to_token_major
from inferencex.convert.passes.weights import fold_weights, mark_parameters

Pass = Callable[[ir.Model], int | None]


@dataclass(frozen=True)
class Optimized:
    """The IR of a model, and what the passes did.

    model:      token-major graph; initializers that are parameters carry a `WeightExpression` and no value.
    ops_before: operators of the captured graph by type.
    ops_after:  operators of the result by type.
    rewrites:   how often each pass applied, in the order they ran.
    """

    model: ir.Model
    ops_before: dict[str, int]
    ops_after: dict[str, int]
    rewrites: dict[str, int]


def operators(model: ir.Model) -> dict[str, int]:
    """Count a graph's operators by type; our own carry their domain."""
    names = (f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in model.graph if n.op_type != "Constant")
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def optimize(captured: Captured, *, max_positions: int) -> Optimized:
    """Rewrite `captured.model` in place into the IR dialect; RoPE tables get `max_positions` rows.

    Raises CaptureError when the model combines tokens other than by attention, or masks in a way that has no form.
    """
    model = captured.model
    before = operators(model)
    names = {name for name, _ in captured.module.named_parameters(remove_duplicate=False)}
    names |= set(captured.module.state_dict())
    mark_parameters(model.graph, names, captured.aliases)
    rewrites: dict[str, int] = {}
    passes: list[tuple[str, Pass]] = [
        ("fold constants", simplify),
        ("infer shapes", infer_shapes),
        ("fold weights", fold_weights),
        ("in-line attention", lambda m: recognize_attention(m, context=max_positions)),
        ("absorb masks", absorb_masks),
        ("drop batch dimension", to_token_major),
        ("remove no-ops", remove_no_ops),
        ("position tables", lambda m: check_position_tables(m, max_positions=max_positions)),
        ("linears", canonicalize_linears),
        ("norms", fuse_norms),
        ("gated activations", fuse_gated_activations),
        ("experts", fuse_experts),
        ("rotary embeddings", lambda m: fuse_rope(m, max_positions=max_positions)),
        ("remove no-ops", remove_no_ops),
        ("merge projections", merge_projections),
        ("residual norms", fuse_residual_norms),
        ("gather rows early", gather_rows_early),
        ("remove no-ops", remove_no_ops),
        ("fold constants", simplify),
        ("tables of angles", store_angles),
        ("name values", name_values),
    ]
    for name, run in passes:
        rewrites[name] = rewrites.get(name, 0) + (run(model) or 0)
    return Optimized(model, before, operators(model), {n: c for n, c in rewrites.items() if c})
