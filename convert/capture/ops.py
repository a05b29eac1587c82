"""Opaque torch operators that stand in the captured graph where a model mixes tokens or routes them to experts.

Each computes the real thing for one sequence, so that a captured graph can be executed as it is and compared with
the module it was captured from.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible(positions: Tensor, window: int, chunk: int) -> Tensor:
    """Return which keys each query sees, bool `[T, T]`, for one sequence at `positions [T]`."""
    query, key = positions[:, None], positions[None, :]
    seen = key <= query
    if window:
        seen = seen & (query - key < window)
    if chunk:
        seen = seen & (query // chunk == key // chunk)
    return seen


@torch.library.custom_op("inferencex::causal_mask", mutates_args=())
def causal_mask(positions: Tensor, window: int, chunk: int) -> Tensor:
    """Additive mask, float32 `[1, 1, T, T]`: 0 where `positions [1, T]` see each other, else the lowest float."""
    lowest = torch.finfo(torch.float32).min
    return torch.where(visible(positions[0], window, chunk), 0.0, lowest)[None, None]


@causal_mask.register_fake
def _(positions: Tensor, window: int, chunk: int) -> Tensor:
    tokens = positions.shape[-1]
    return positions.new_empty((1, 1, tokens, tokens), dtype=torch.float32)


@torch.library.custom_op("inferencex::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Attention over one sequence: `q [1, T, H * Dk]`, `k [1, T, G * Dk]`, `v [1, T, G * Dv]` -> `[1, T, H * Dv]`.

    `mask` is what `causal_mask` returned; without it the mask is causal with `window` (0 for none).
    """
    tokens, group = q.shape[1], num_heads // num_kv_heads
    heads = torch.unflatten(q[0], -1, (num_heads, -1)).transpose(0, 1)
    keys = torch.unflatten(k[0], -1, (num_kv_heads, -1)).transpose(0, 1).repeat_interleave(group, 0)
    values = torch.unflatten(v[0], -1, (num_kv_heads, -1)).transpose(0, 1).repeat_interleave(group, 0)
    scores = heads @ keys.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        lowest = torch.finfo(torch.float32).min
        scores = scores + torch.where(visible(torch.arange(tokens), window, 0), 0.0, lowest)
    else:
        scores = scores + mask[0]
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, tokens, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
    return (weights @ values).transpose(0, 1).flatten(1)[None]


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], num_heads * (v.shape[-1] // num_kv_heads)))


@torch.library.custom_op("inferencex::expert_linear", mutates_args=())
def expert_linear(x: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Linear layer with one of `weight [E, N, K]` per row: `x [M, K]`, `expert_ids [M]` -> `[M, N]`."""
    y = x.new_zeros((x.shape[0], weight.shape[1]))
    for expert in torch.unique(expert_ids).tolist():
        rows = (expert_ids == expert).nonzero()[:, 0]
        part = x[rows] @ weight[expert].T
        y[rows] = part if bias is None else part + bias[expert]
    return y


@expert_linear.register_fake
def _(x: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


@torch.library.custom_op("inferencex::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`, opaque while recording: torch would decompose it to learn its shape, slowly."""
    return torch.nn.functional.linear(x, weight, bias).clone()


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


LINEAR = torch.ops.inferencex.linear.default
