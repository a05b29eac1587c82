"""Rotary embeddings whose frequencies depend on the length of the sequence, made a function of each token.

transformers picks the frequencies of `longrope` and `dynamic` from the longest sequence of the batch, in a Python
branch. In a ragged batch every token must follow its own sequence: here the rotary module of such a model computes
its angles per token from the length of the prompt that the token's sequence began with (longrope), or that length
and the token's own position, whichever is further (dynamic NTK). Both equal transformers on one whole sequence.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def _rope_type(module: torch.nn.Module, layer_type: str | None) -> str:
    rope_type = getattr(module, "rope_type", "")
    return str(rope_type.get(layer_type, "") if isinstance(rope_type, dict) else rope_type)


def _with_frequencies(module: torch.nn.Module, prefix: str, inv_freq: Tensor) -> Any:
    """Return a shallow copy of the rotary `module` that uses `inv_freq [D / 2]`."""
    clone = copy.copy(module)
    clone.__dict__["_buffers"] = {**module._buffers, f"{prefix}inv_freq": inv_freq}
    return clone


def _angles(module: torch.nn.Module, lengths: Tensor, x: Tensor, position_ids: Tensor, layer_type: str | None) -> Any:
    """Compute what the rotary module returns, each token with the frequencies of `lengths [1, T]`."""
    raw = inspect.unwrap(type(module).forward)
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    prefix = "" if layer_type is None else f"{layer_type}_"
    kind = _rope_type(module, layer_type)
    config: Any = module.config
    short = getattr(module, f"{prefix}original_inv_freq")
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    if kind == "longrope":
        original = parameters["original_max_position_embeddings"]
        long, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=original + 1, **kwargs)
        pairs = zip(
            raw(_with_frequencies(module, prefix, long), x, position_ids, **kwargs),
            raw(_with_frequencies(module, prefix, short), x, position_ids, **kwargs),
            strict=True,
        )
        beyond = (lengths > original)[..., None]
        return tuple(torch.where(beyond, with_long, with_short) for with_long, with_short in pairs)

    base = parameters["rope_theta"]
    limit = config.max_position_embeddings
    dim = 2 * short.shape[0]
    reached = torch.maximum(torch.maximum(lengths, position_ids + 1), torch.full_like(lengths, limit))[0]
    factor = parameters["factor"]
    scaled = base * ((factor * reached / limit) - (factor - 1)) ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    inv_freq = 1.0 / scaled[:, None] ** exponents[None, :]
    return raw(_with_frequencies(module, prefix, inv_freq[None]), x, position_ids, **kwargs)


@contextlib.contextmanager
def length_aware(model: torch.nn.Module, lengths: Tensor) -> Iterator[bool]:
    """Make the rotary modules of `model` that need it read `lengths [1, T]`; yields whether there are any."""
    patched = []
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
        if any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds):

            def forward(
                x: Tensor, position_ids: Tensor, layer_type: str | None = None, _module: torch.nn.Module = module
            ) -> Any:
                kind = _rope_type(_module, layer_type)
                if kind == "longrope" or "dynamic" in kind:
                    return _angles(_module, lengths, x, position_ids, layer_type)
                kwargs = {} if layer_type is None else {"layer_type": layer_type}
                return type(_module).forward(_module, x, position_ids, **kwargs)

            module.__dict__["forward"] = forward
            patched.append(module)
    try:
        yield bool(patched)
    finally:
        for module in patched:
            del module.__dict__["forward"]
