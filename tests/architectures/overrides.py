"""Fields that the generic shrinking cannot guess, by architecture; all of it is test data.

Most entries ask for a kind of layer that the architecture has but its default configuration leaves out, or bring a
threshold (a window, an index budget, an original context) below the length of the test sequences. `default_from`
holds the fields without which an architecture's own defaults are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SLIDING_FULL = ["sliding_attention", "full_attention"]
DENSE_SPARSE = ["dense", "sparse"]
BYTES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
LINEAR_FULL = ["linear_attention", "full_attention"]

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {"mup_enabled": True, "route_scale": 1.5},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 512,
        "local_attention_window_len": 8,
        "encoder_config": {"hidden_size_global": 128, **BYTES},
        "decoder_config": {"hidden_size_global": 128, **BYTES},
        "global_config": {**BYTES, "hidden_size": 128, "head_dim": 32},
        "patcher_config": {**BYTES, "head_dim": 16},
    },
    "cohere2_moe": {"mlp_layer_types": DENSE_SPARSE, "prefix_dense_intermediate_size": 80, "num_shared_experts": 1},
    "cohere_compass_text": {
        "layer_types": SLIDING_FULL,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": None,
        },
        "logit_scale": 0.25,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_topk": 2,
    },
    "doge": {"keep_window_size": 8},
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots1": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "layer_types": SLIDING_FULL,
        "max_window_layers": 1,
    },
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 12,
        "head_dim": 24,
    },
    "falcon_h1": {
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "mlp_multipliers": [0.8, 0.6],
        "key_multiplier": 0.5,
        "attention_out_multiplier": 0.7,
        "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5],
        "ssm_out_multiplier": 0.6,
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": [*SLIDING_FULL, *SLIDING_FULL],
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
    },
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": LINEAR_FULL},
    "granitemoeshared": {"shared_intermediate_size": 40},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None, "L_cycles": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "inkling2_loop_text": {
        "unpadded_vocab_size": 250,
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding"],
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
        "log_scaling_n_floor": 8,
        "rel_extent": 16,
        "d_rel": 8,
    },
    "inkling2_text": {
        "unpadded_vocab_size": 250,
        "n_layers_per_attn_res_block": 1,
        "log_scaling_n_floor": 8,
        "rel_extent": 16,
        "d_rel": 8,
    },
    "inkling_text": {
        "mlp_layer_types": DENSE_SPARSE,
        "log_scaling_n_floor": 8,
        "rel_extent": 16,
        "d_rel": 8,
        "logits_mup_width_multiplier": 2.0,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 0,
    },
    "laguna": {
        "layer_types": SLIDING_FULL,
        "num_attention_heads_per_layer": [8, 4],
        "moe_router_logit_softcapping": 3.0,
    },
    "lfm2": {"num_hidden_layers": 2, "full_attn_idxs": [1], "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {
        "default_from": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "llama4_text": {
        "moe_layers": [1, 3],
        "interleave_moe_layer_step": 2,
        "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
        "no_rope_layers": [1, 1, 1, 0],
        "floor_scale": 8,
    },
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": SLIDING_FULL, "mlp_layer_types": DENSE_SPARSE},
    "mimo_v2_flash": {"v_head_dim": 12},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": DENSE_SPARSE,
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": 16, "layer_types": SLIDING_FULL},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_lowrank": 8,
        "hc_count": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "smollm3": {"no_rope_layers": [1, 0]},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 8, "router_hidden_size": 24},
}
