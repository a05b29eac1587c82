"""Route the attention, mask and expert layers of transformers into the opaque operators, for one capture.

transformers lets an implementation be registered by name for each of the three; models look it up in their config.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from inferencex.convert.capture import ops
from inferencex.formats.errors import CaptureError

NAME = "inferencex"
UNKNOWN_MASK = (-1, -1)

# Arguments that models pass along and that change nothing here: of training, of caches, of packed batches.
_NO_EFFECT = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "cu_seqlens", "deterministic", "dropout", "is_causal",
    "layer_type", "logits_to_keep", "max_length_k", "max_length_q", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_ids", "return_dict", "use_cache", "is_first_iteration", "labels",
    "token_type_ids", "input_ids",
}  # fmt: skip
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass
class _Positions:
    """The position input of the capture in progress; masks refer to it."""

    value: Tensor | None = None


_positions = _Positions()


def attention_route(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Serve as an attention implementation: `query [1, H, T, Dk]`, `key`/`value [1, G, T, D]` -> `[1, T, H, Dv]`.

    Raises CaptureError for an argument that would change what attention computes and has no form in the IR.
    """
    unknown = [name for name, given in others.items() if name not in _NO_EFFECT and given is not None]
    if unknown:
        raise CaptureError(
            f"{type(module).__name__} gives attention the arguments {', '.join(sorted(unknown))}, which have no form "
            "in the IR (sparse attention, position biases)"
        )
    # With a mask, the mask decides; without one, attention here is causal.
    unmasked_both_ways = attention_mask is None and others.get("is_causal") is False
    if unmasked_both_ways or not getattr(module, "is_causal", True):
        raise CaptureError(f"{type(module).__name__} attends in both directions; only causal attention is supported")
    _, num_heads, tokens, head_dim = query.shape
    num_kv_heads, value_dim = key.shape[1], value.shape[-1]
    window = sliding_window if attention_mask is None and isinstance(sliding_window, int) else 0
    y = ops.attention(
        query.transpose(1, 2).reshape(1, tokens, num_heads * head_dim),
        key.transpose(1, 2).reshape(1, tokens, num_kv_heads * head_dim),
        value.transpose(1, 2).reshape(1, tokens, num_kv_heads * value_dim),
        attention_mask,
        s_aux if sinks is None else sinks,
        num_heads,
        num_kv_heads,
        float(scaling) if scaling is not None else head_dim**-0.5,
        max(window, 0),
        float(softcap or 0.0),
    )
    return y.reshape(1, tokens, num_heads, value_dim), None


def mask_route(*, mask_function: MaskFunction, **ignored: Any) -> Tensor:
    """Serve as a mask implementation: find the window or chunk of `mask_function`, and return an opaque mask."""
    with _disable_current_modes():
        try:
            window, chunk = mask_shape(mask_function)
        except (CaptureError, TypeError, RuntimeError, AssertionError):
            window, chunk = UNKNOWN_MASK  # models make masks they never use; `absorb_masks` refuses those they do
    if _positions.value is None:
        raise CaptureError("a mask was asked for outside of a capture")
    mask: Tensor = ops.causal_mask(_positions.value, window, chunk)
    return mask


def mask_shape(mask_function: MaskFunction) -> tuple[int, int]:
    """Describe a mask by `(window, chunk)`, 0 where it has none; `mask_function(batch, head, query, key)`.

    The mask is probed, not parsed. Raises CaptureError when it is not causal with at most one of the two.
    """
    zero = torch.zeros((), dtype=torch.int64)

    def sees(queries: Tensor, keys: Tensor) -> Tensor:
        return torch.as_tensor(mask_function(zero, zero, queries, keys)).expand(queries.shape).to(torch.bool)

    def first_seen(query: int) -> int:
        """Find the earliest key a query sees; what it sees is one stretch that ends at itself."""
        low, high = 0, query
        while low < high:
            middle = (low + high) // 2
            seen = bool(sees(torch.tensor([query]), torch.tensor([middle])))
            low, high = (low, middle) if seen else (middle + 1, high)
        return low

    far = 1 << 21
    window = far - first_seen(far) + 1 if first_seen(far) else 0
    chunk = 0
    if window and far + 1 - first_seen(far + 1) + 1 != window:
        low, high = 0, far
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if first_seen(middle) else (middle + 1, high)
        window, chunk = 0, low
    near = torch.arange(0, 96)
    edges = [size + delta for size in (window, chunk) if size for delta in (-1, 0, 1, size, 2 * size + 1)]
    queries = torch.tensor([100, 1023, 4096, 65537, far, *edges])
    steps = torch.tensor([-9, -1, 0, 1, 2, 17, *[size + d for size in (window, chunk) if size for d in (-1, 0, 1)]])
    pairs = torch.cat(
        [
            torch.cartesian_prod(near, near),
            torch.stack([queries.repeat_interleave(len(steps)), (queries[:, None] - steps).flatten()], dim=1),
            torch.stack([queries, torch.zeros_like(queries)], dim=1),
        ]
    )
    query, key = pairs[(pairs >= 0).all(1)].unbind(1)
    expected = key <= query
    if window:
        expected &= query - key < window
    if chunk:
        expected &= query // chunk == key // chunk
    wrong = (sees(query, key) != expected).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise CaptureError(
            f"the attention mask is not causal with at most one window or chunk (query {query[at]}, key {key[at]})"
        )
    return window, chunk


def experts_route(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Serve as an experts implementation: `[T, S]`, `[T, k]`, `[T, k]` -> `[T, S]`, as grouped linears per row."""
    tokens, width = hidden_states.shape
    k = top_k_index.shape[-1]
    rows = hidden_states[:, None, :].expand(tokens, k, width).reshape(tokens * k, width)
    ids = top_k_index.reshape(tokens * k)
    weight = self.gate_up_proj if self.has_gate else self.up_proj
    bias = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias) if self.has_bias else None
    down, down_bias = self.down_proj, self.down_proj_bias if self.has_bias else None
    if self.is_transposed:
        weight, down = weight.transpose(1, 2), down.transpose(1, 2)
    inner = ops.expert_linear(rows, ids, weight, bias)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outer = ops.expert_linear(inner, ids, down, down_bias)
    if self.has_post_expert_norm:
        outer = self.post_expert_norm(outer)
    outer = outer * top_k_weights.reshape(tokens * k, 1)
    combined: Tensor = outer.reshape(tokens, k, outer.shape[-1]).sum(dim=1)
    return combined


def _chunked_overlay(chunk_size: int, left_padding: Tensor) -> MaskFunction:
    """Chunked attention without padding: in a ragged batch there is none."""
    return lambda batch, head, query, key: query // chunk_size == key // chunk_size


def _linear_route(self: torch.nn.Linear, x: Tensor) -> Tensor:
    """Serve as the forward of linear layers; `tidy` turns the operator back into torch's own."""
    y: Tensor = ops.linear(x, self.weight, self.bias)
    return y


@contextlib.contextmanager
def routed(positions: Tensor) -> Iterator[None]:
    """Make `NAME` an attention, mask and experts implementation while a graph over `positions [1, T]` is recorded."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_route)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_route)
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_route)
    replaced = {"find_packed_sequence_indices": lambda positions: None, "chunked_overlay": _chunked_overlay}
    originals = {name: getattr(masking_utils, name) for name in replaced}
    linear_forward = torch.nn.Linear.forward
    try:
        setattr(torch.nn.Linear, "forward", _linear_route)  # noqa: B010 - the types of the two differ by a name
        for name, function in replaced.items():
            setattr(masking_utils, name, function)
        _positions.value = positions
        yield
    finally:
        _positions.value = None
        setattr(torch.nn.Linear, "forward", linear_forward)  # noqa: B010
        for name, function in originals.items():
            setattr(masking_utils, name, function)
