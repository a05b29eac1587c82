"""Writing a checkpoint of the Llama family as a GGUF file, for the engines that read those."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from bench.checkpoints import tokenizer_origin

_PER_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def write_gguf(checkpoint: Path, destination: Path) -> None:
    """Write weights as float16 and norms as float32, with SmolLM2's tokenizer filled up to the vocabulary."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(destination, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    _add_tokenizer(writer, config["vocab_size"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in file.offset_keys():
            value = file.get_tensor(name).float().numpy()
            part = name.split(".")[-2]
            if part in heads:
                value = _interleaved(value, heads[part])
            writer.add_tensor(gguf_name(name), value if value.ndim == 1 else value.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    if name in _OTHERS:
        return _OTHERS[name]
    _, _, layer, inner = name.split(".", 3)
    return f"blk.{layer}.{_PER_LAYER[inner.removesuffix('.weight')]}.weight"


def _interleaved(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Order the rows of each head for RoPE over adjacent pairs, as GGUF's `llama` architecture has them."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    fields = gguf.GGUFReader(tokenizer_origin()).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    tokens += [f"<unused_{place}>" for place in range(len(tokens), vocab_size)]
    types += [int(gguf.TokenType.UNUSED)] * (vocab_size - len(types))
    writer.add_tokenizer_model(fields["tokenizer.ggml.model"].contents())
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"].contents())
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_bos_token_id(fields["tokenizer.ggml.bos_token_id"].contents())
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"].contents())
    if "tokenizer.chat_template" in fields:
        writer.add_chat_template(fields["tokenizer.chat_template"].contents())
