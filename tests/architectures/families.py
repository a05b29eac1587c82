"""A short list of models that together use every architectural feature a decoder-only transformer may have.

The lengths that matter are tiny (an original context or a window of 8 or 16 tokens), so that test sequences of a few
dozen tokens cross them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """One configuration: what it stands for, the architecture, and the fields that differ from its tiny default."""

    id: str
    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


ORIGINAL = 16
LONGROPE = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": ORIGINAL,
}
SLIDING_FULL = ["sliding_attention", "full_attention"]

FAMILIES: Sequence[Family] = (
    # how heads share keys and values
    Family("mha", "llama", {"num_key_value_heads": 4}),
    Family("gqa", "llama"),
    Family("mqa", "llama", {"num_key_value_heads": 1}),
    Family("mqa-packed-learned-positions", "gpt_bigcode"),
    Family("mla", "deepseek_v2", {"first_k_dense_replace": 2}),
    Family("mla-interleaved-moe", "deepseek_v3"),
    Family("mla-no-query-rank", "deepseek_v3", {"q_lora_rank": None}),
    Family("mla-scaled-residual", "minicpm3"),
    Family("head-dim-not-hidden-over-heads", "mistral", {"head_dim": 24, "sliding_window": None}),
    Family("value-head-dim-differs", "mimo_v2_flash"),
    # norms and biases
    Family("qk-norm-per-head", "qwen3"),
    Family("qk-norm-over-all-heads", "olmo2"),
    Family("qk-layernorm", "persimmon"),
    Family("qk-norm-after-rope", "hunyuan_v1_dense"),
    Family("qkv-bias", "qwen2"),
    Family("all-biases", "starcoder2"),
    Family("attention-and-mlp-bias", "llama", {"attention_bias": True, "mlp_bias": True}),
    Family("norm-without-weight", "olmo", {"clip_qkv": 1.0}),
    Family("norm-weight-plus-one", "nemotron"),
    Family("post-norms", "glm4"),
    Family("post-norms-only", "exaone4"),
    # positions
    Family("rope-default-partial", "phi"),
    Family("rope-partial-sequential-residual", "stablelm"),
    Family("rope-partial-packed-qkv", "gpt_neox", {"use_parallel_residual": False}),
    Family("rope-interleaved-partial", "gptj"),
    Family("rope-interleaved-packed", "codegen"),
    Family("rope-interleaved", "ernie4_5"),
    Family("rope-interleaved-half-of-head", "glm"),
    Family("rope-linear", "llama", _rope("linear", factor=4.0)),
    Family("rope-dynamic", "llama", {"max_position_embeddings": ORIGINAL, **_rope("dynamic", factor=2.0)}),
    Family("rope-yarn", "qwen3", _rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL)),
    Family(
        "rope-yarn-mscale-mla",
        "deepseek_v3",
        _rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, mscale=1.0, mscale_all_dim=0.7),
    ),
    Family("rope-yarn-temperature-by-position", "ministral3"),
    Family(
        "rope-longrope",
        "phi3",
        {"max_position_embeddings": 64, "original_max_position_embeddings": ORIGINAL, **_rope("longrope", **LONGROPE)},
    ),
    Family(
        "rope-llama3",
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=ORIGINAL,
        ),
    ),
    Family("rope-proportional-per-layer-type", "gemma4_text"),
    Family("rope-theta-per-layer-type", "gemma3_text"),
    Family("rope-in-some-layers", "smollm3"),
    Family("rope-none-in-full-layers", "cohere2"),
    Family("learned-positions", "gpt2"),
    Family("learned-positions-offset", "opt"),
    Family("learned-positions-post-norm", "opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    Family("sinusoidal-positions", "xglm"),
    Family("alibi", "bloom"),
    Family("alibi-no-bias", "mpt"),
    # masks
    Family("sliding-everywhere", "mistral"),
    Family("sliding-alternating-softcaps", "gemma2"),
    Family("sliding-three-of-four", "olmo3", {"num_hidden_layers": 4, "layer_types": None}),
    Family("sinks-clamped-experts-yarn", "gpt_oss"),
    # residual structure, scales, heads
    Family("parallel-blocks", "cohere", {"use_qk_norm": True}),
    Family("parallel-blocks-multi-query", "falcon"),
    Family("parallel-blocks-two-norms", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    Family("scaled-embeddings-and-logits", "granite"),
    Family("scaled-embeddings-wide-heads", "gemma", {"head_dim": 32}),
    Family("tied-head", "qwen2", {"tie_word_embeddings": True}),
    Family("untied-head-with-bias", "phimoe", {"lm_head_bias": True, "attention_bias": True}),
    Family("differential-attention", "diffllama"),
    Family("gated-attention", "afmoe"),
    # feed-forward
    Family("relu-squared-no-gate", "arcee"),
    Family("learned-activation", "apertus"),
    Family("moe", "mixtral"),
    Family("moe-normalized-weights", "qwen3_moe", {"norm_topk_prob": True}),
    Family("moe-gated-shared-expert", "qwen2_moe"),
    Family("moe-shared-expert-groups", "glm4_moe", {"n_group": 2, "topk_group": 1, "n_routed_experts": 8}),
    Family("moe-every-second-layer", "qwen3_moe", {"decoder_sparse_step": 2}),
    # keys and values of one layer used by another
    Family("kv-sharing-altup", "gemma3n_text"),
    Family(
        "kv-sharing-per-layer-embeddings",
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "layer_types": [*SLIDING_FULL, *SLIDING_FULL],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    Family(
        "keys-are-values-moe",
        "gemma4_text",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
            "hidden_size_per_layer_input": 0,
        },
    ),
)
