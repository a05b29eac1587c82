"""Layers of gated experts, and linear layers whose weight is chosen row by row (Shazeer et al. 2017).

Assignments of tokens to experts are sorted on the device (expert_routing.py), go through the two grouped products
(grouped_linear.py) with the gate between them, and are added up by token in the order in which the token names them:
no result depends on what else is in the step, but through the tiles that sizes decide on.
"""

# Triton reads the types of a kernel's arguments when it is launched: annotations say only what is a constant.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferencex.runtime.backends.triton.kernels.activation import gated_activation
from inferencex.runtime.backends.triton.kernels.expert_routing import route
from inferencex.runtime.backends.triton.kernels.grouped_linear import grouped_linear, tile_of
from inferencex.runtime.backends.triton.kernels.variant import KernelVariant
from inferencex.runtime.backends.triton.weights import LinearWeight

_ADDED_AT_ONCE = 1024


@triton.jit
def _add_experts(z, ids, weights, y, width, k, experts, BLOCK: tl.constexpr):
    """Add a token's `k` rows of `z [T * k, width]` by its weights; grid `[T, ceil(width / BLOCK)]`.

    Reads each row once; one whose expert does not exist counts nothing, and was not written.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(k):
        assignment = token * k + j
        expert = tl.load(ids + assignment)
        is_valid = (expert >= 0) & (expert < experts)
        row = tl.load(z + assignment * width + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(is_valid, tl.load(weights + assignment).to(tl.float32) * row, 0.0)
    tl.store(y + token * width + column, total.to(y.dtype.element_ty), mask=inside)


def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: LinearWeight,
    down: LinearWeight,
    activation: str,
    layout: str = "concat",
    alpha: float = 1.0,
    limit: float = 0.0,
) -> Tensor:
    """Return `[T, S]`, the dialect's `Experts`, in the type of `x`.

    x:             `[T, S]`
    top_k_index:   int32 or int64 `[T, k]`; a token's experts outside `0 .. E - 1` add nothing
    top_k_weights: `[T, k]`
    gate_up:       a stack `[E, 2F, S]`, with its biases
    down:          a stack `[E, S, F]`, with its biases
    """
    tokens, k = top_k_index.shape
    if top_k_weights.shape != top_k_index.shape or x.dim() != 2 or x.shape[0] != tokens:
        raise ValueError(
            f"rows {list(x.shape)} with experts {list(top_k_index.shape)} and weights {list(top_k_weights.shape)}; "
            "expected [T, S], [T, k] and [T, k]"
        )
    if gate_up.experts != down.experts or gate_up.out_features != 2 * down.in_features:
        raise ValueError(f"stacks {list(gate_up.shape)} and {list(down.shape)}; expected [E, 2F, S] and [E, S, F]")
    y = torch.empty((tokens, down.out_features), dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    ids, weights = top_k_index.contiguous(), top_k_weights.contiguous()
    assignments = tokens * k
    routing = route(ids.view(-1), gate_up.experts, tile_of(assignments, gate_up, down))
    inner = grouped_linear(x.contiguous(), gate_up, routing, assignments, shared=k)
    outer = grouped_linear(gated_activation(inner, activation, layout, alpha, limit), down, routing, assignments)
    width = down.out_features
    grid = (tokens, triton.cdiv(width, _ADDED_AT_ONCE))
    _add_experts[grid](outer, ids, weights, y, width, k, down.experts, BLOCK=_ADDED_AT_ONCE)
    return y


def expert_linear(x: Tensor, expert_ids: Tensor, weight: LinearWeight) -> Tensor:
    """Return `x[m] @ weight[expert_ids[m]].T + bias[expert_ids[m]]`, `[M, N]`: the dialect's `ExpertLinear`.

    x:          `[M, K]`
    expert_ids: int32 or int64 `[M]`, all in `0 .. E - 1`
    weight:     a stack `[E, N, K]`, with its biases
    """
    assignments = x.shape[0]
    if list(expert_ids.shape) != [assignments]:
        raise ValueError(f"{list(expert_ids.shape)} expert ids for rows {list(x.shape)}")
    if not assignments:
        return torch.empty((0, weight.out_features), dtype=x.dtype, device=x.device)
    routing = route(expert_ids.contiguous(), weight.experts, tile_of(assignments, weight))
    return grouped_linear(x.contiguous(), weight, routing, assignments)


def variants() -> list[KernelVariant]:
    """Return what launches compile."""
    return [
        KernelVariant(
            _add_experts,
            f"experts, sum of {dtype}, ids {ids}",
            {
                "z": f"*{dtype}",
                "ids": f"*{ids}",
                "weights": f"*{dtype}",
                "y": f"*{dtype}",
                "width": "i32",
                "k": "i32",
                "experts": "i32",
            },
            {"BLOCK": _ADDED_AT_ONCE},
            aligned=("z", "ids", "weights", "y", "width"),
        )
        for dtype in ("fp16", "bf16", "fp32")
        for ids in ("i64", "i32")
    ]
