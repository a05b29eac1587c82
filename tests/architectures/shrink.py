"""Shrink any architecture's default configuration to a few kilobytes of weights, keeping every kind of layer it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.architectures.overrides import OVERRIDES

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MAX_LAYERS = 4

# Widths differ wherever architectures allow it, so that no axis can be mistaken for another.
SIZES: Mapping[str, int] = {
    # model
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "embedding_dim": 64,
    "word_embed_proj_dim": 64,
    "vocab_size": 256,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 8,
    # attention
    "num_attention_heads": 4,
    "attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "swa_num_attention_heads": 4,
    "num_key_value_heads": 2,
    "swa_num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "swa_head_dim": 16,
    "kv_channels": 16,
    "dim_head": 16,
    "rotary_dim": 8,
    "query_pre_attn_scalar": 12,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    # feed-forward and experts
    "intermediate_size": 96,
    "intermediate_size_mlp": 80,
    "dense_intermediate_size": 80,
    "ffn_dim": 96,
    "dim_ff": 96,
    "dff": 96,
    "ffn_hidden_size": 96,
    "moe_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 40,
    "shared_experts_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "shared_intermediate_size": 40,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # positions
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "max_seq_len": 512,
    "context_length": 512,
    "model_max_length": 512,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "window_size": 8,
    "attention_window_size": 8,
    "local_attention": 16,
    "attention_chunk_size": 8,
    # recurrent state
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "state_size": 16,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "n_groups": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 16,
    "lru_width": 64,
}

# Default 0 or 1 switches the part off or makes it the special case the architecture is about (MQA, top-1, one group).
KEEP_UP_TO_ONE = frozenset(
    {
        "num_key_value_heads",
        "num_experts_per_tok",
        "moe_topk",
        "moe_top_k",
        "n_group",
        "num_expert_group",
        "topk_group",
        "first_k_dense_replace",
        "sliding_window",
        "shared_intermediate_size",
        "hidden_size_per_layer_input",
        "n_groups",
    }
)

# Factors that are 1 by default, and would then hide whether they are applied at all.
FACTORS: Mapping[str, float] = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "attention_in_multiplier": 0.9,
    "ssm_in_multiplier": 0.9,
    "routed_scaling_factor": 1.5,
    "moe_routed_scaling_factor": 1.5,
    "linear_attn_alpha_factor": 1.5,
    "linear_attn_beta_factor": 0.7,
    "full_attn_alpha_factor": 1.2,
    "mlp_beta_factor": 0.8,
}

SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny_config(name: str, **overrides: Any) -> PretrainedConfig:
    """Return `name`'s default configuration shrunk to hidden size 64 and 2 to 4 layers.

    `overrides` are fields of the configuration and win over everything else.
    """
    config_class: type[PretrainedConfig] = CONFIG_MAPPING[name]
    known = OVERRIDES.get(name, {})
    fields = {**_shrunk_fields(config_class, known.get("default_from", {})), **known, **overrides}
    fields.pop("default_from", None)
    return config_class(**fields)


def _shrunk_fields(config_class: type[PretrainedConfig], required: Mapping[str, Any]) -> dict[str, Any]:
    default = config_class(**required)
    values = default.to_dict()
    fields: dict[str, Any] = {key: size for key, size in SIZES.items() if _shrinks(key, values.get(key))}
    if "qk_nope_head_dim" in values:  # multi-head latent attention expands its keys to every head
        fields.pop("head_dim", None)
        if "num_key_value_heads" in fields:
            fields["num_key_value_heads"] = fields["num_attention_heads"]
    if fields.keys() & {"n_group", "num_expert_group"}:  # every group then offers more experts than are taken
        fields.update({key: 8 for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in fields})
    fields.update({key: factor for key, factor in FACTORS.items() if values.get(key) == 1.0})
    for key, token in SPECIAL_TOKENS.items():
        if isinstance(values.get(key), int | list):
            fields[key] = token
    fields.update(_layer_pattern(values))
    for key in default.sub_configs:
        sub = getattr(default, key, None)
        if sub is not None:
            fields[key] = type(sub)(**_shrunk_fields(type(sub), {}))
    return fields


def _shrinks(key: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value > 1 if key in KEEP_UP_TO_ONE else value > 0


def _layer_pattern(values: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the fewest layers, from two to four, that show every value of every per-layer list."""
    count_key = next((key for key in LAYER_COUNTS if isinstance(values.get(key), int)), None)
    if count_key is None:
        return {}
    count = values[count_key]
    lists = {key: v for key, v in values.items() if isinstance(v, list) and len(v) == count and count > 2}
    unseen = {(key, str(v)) for key, items in lists.items() for v in items}
    chosen: list[int] = []
    while unseen and len(chosen) < MAX_LAYERS:
        gains = [len({(key, str(items[i])) for key, items in lists.items()} & unseen) for i in range(count)]
        best = gains.index(max(gains))
        chosen.append(best)
        unseen -= {(key, str(items[best])) for key, items in lists.items()}
    chosen += [i for i in range(count) if i not in chosen][: max(0, 2 - len(chosen))]
    chosen.sort()
    fields: dict[str, Any] = {count_key: len(chosen)}
    for key, items in lists.items():
        size = SIZES.get(key)
        fields[key] = [items[i] if size is None else size for i in chosen]
    return fields
