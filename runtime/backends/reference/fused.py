"""The stateless operators of domain `inferencex` in torch; `Attention` is in `attention.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inferencex.formats.dialect.names import DOMAIN
from inferencex.runtime.backends.reference.registry import Registry

OPERATORS = Registry()


def activate(x: Tensor, activation: str, alpha: float = 1.0) -> Tensor:
    """Apply a named activation elementwise."""
    match activation:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case "sigmoid":
            return torch.sigmoid(x)
    raise ValueError(f"unknown activation {activation!r}")


@OPERATORS.operator("GatedActivation", DOMAIN)
def gated_activation(
    x: Tensor, activation: str, layout: str = "concat", alpha: float = 1.0, limit: float = 0.0
) -> Tensor:
    """`[T, 2F]` -> `[T, F]`."""
    gate, up = (x[..., 0::2], x[..., 1::2]) if layout == "interleaved" else x.chunk(2, dim=-1)
    if activation == "swiglu_clamped":
        gate, up = (gate.clamp(max=limit), up.clamp(-limit, limit)) if limit else (gate, up)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    return activate(gate, activation) * up


@OPERATORS.operator("AddRMSNormalization", DOMAIN)
def add_rms_norm(x: Tensor, residual: Tensor, scale: Tensor, epsilon: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Return the normalized sum and the sum."""
    total = x + residual
    return total * torch.rsqrt(torch.mean(total * total, -1, True) + epsilon) * scale, total


@OPERATORS.operator("AddLayerNormalization", DOMAIN)
def add_layer_norm(
    x: Tensor, residual: Tensor, scale: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return the normalized sum and the sum."""
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], scale, bias, epsilon), total


@OPERATORS.operator("ExpertLinear", DOMAIN)
def expert_linear(x: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply to each row the linear layer of its expert."""
    y = x.new_zeros((x.shape[0], weight.shape[1]))
    for expert in torch.unique(expert_ids).tolist():
        rows = (expert_ids == expert).nonzero()[:, 0]
        part = x[rows] @ weight[expert].to(torch.float32).T
        y[rows] = part if bias is None else part + bias[expert]
    return y


@OPERATORS.operator("Experts", DOMAIN)
def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    layout: str = "concat",
    alpha: float = 1.0,
    limit: float = 0.0,
) -> Tensor:
    """Run every token through its experts and add their outputs by weight."""
    tokens, k = top_k_index.shape
    ids = top_k_index.reshape(-1)
    rows = x[:, None, :].expand(tokens, k, x.shape[1]).reshape(tokens * k, x.shape[1])
    inner = gated_activation(expert_linear(rows, ids, gate_up, gate_up_bias), activation, layout, alpha, limit)
    outer = expert_linear(inner, ids, down, down_bias) * top_k_weights.reshape(-1, 1)
    return outer.reshape(tokens, k, outer.shape[1]).sum(1)
