"""How long a model's sequences may be, by whichever name its config has for it."""

from __future__ import annotations

from typing import Any

import transformers

from inferencex.formats.errors import OptionError

_NAMES = ("max_position_embeddings", "max_seq_len", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
DEFAULT_LIMIT = 131072  # rows of a RoPE table unless --max-model-len asks for more
LONGEST = 1 << 24  # tokens for which a graph is recorded; tables for more would not fit in memory anyway
_FALLBACK = 2048


def _rope_parameters(config: transformers.PreTrainedConfig) -> list[dict[str, Any]]:
    """List the RoPE parameters of a config: one set, or one for each kind of layer."""
    found = getattr(config, "rope_parameters", None)
    if not isinstance(found, dict):
        return []
    if "rope_type" in found:
        return [found]
    return [entry for entry in found.values() if isinstance(entry, dict)]


def declared_context(config: transformers.PreTrainedConfig) -> int | None:
    """Return the longest sequence the config declares."""
    for name in _NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def context_length(config: transformers.PreTrainedConfig, asked: int | None) -> int:
    """Return `max_model_len` of a bundle: as asked, else what the config declares, within `DEFAULT_LIMIT`.

    Dynamic NTK scaling reaches `factor` times the declared length. Raises OptionError for a length that
    leaves no room for a prompt and an answer.
    """
    if asked is not None:
        if asked < 2:
            raise OptionError(
                f"--max-model-len {asked}: expected at least 2, one token of a prompt and one of an answer"
            )
        if asked > LONGEST:
            raise OptionError(f"--max-model-len {asked}: expected at most {LONGEST}")
        return asked
    return min(_reach(config, declared_context(config) or _FALLBACK), DEFAULT_LIMIT)


def beyond_declared(config: transformers.PreTrainedConfig, max_model_len: int) -> list[str]:
    """Return a remark when a bundle is to serve longer sequences than the config declares, else nothing."""
    declared = declared_context(config)
    reach = None if declared is None else _reach(config, declared)
    if reach is None or max_model_len <= reach:
        return []
    return [
        f"--max-model-len {max_model_len} is more than the {reach} tokens that the config declares: positions beyond "
        "that extrapolate what the model has learned, and answers may get worse there"
    ]


def _reach(config: transformers.PreTrainedConfig, declared: int) -> int:
    """Return how long sequences may get where the config declares `declared`; dynamic NTK scaling stretches it."""
    for rope in _rope_parameters(config):
        if rope.get("rope_type") == "dynamic":
            declared = int(declared * float(rope.get("factor", 1.0)))
    return declared


def length_independent_up_to(config: transformers.PreTrainedConfig) -> int | None:
    """Return the prompt length up to which RoPE does not depend on it; None when it never does."""
    limits = []
    for rope in _rope_parameters(config):
        if rope.get("rope_type") == "longrope":
            limits.append(
                int(
                    rope.get("original_max_position_embeddings", 0)
                    or getattr(config, "original_max_position_embeddings", 0)
                )
            )
        elif rope.get("rope_type") == "dynamic":
            limits.append(declared_context(config) or 0)
    return min(limits) if limits else None
