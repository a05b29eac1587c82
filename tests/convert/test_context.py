from __future__ import annotations

from transformers import LlamaConfig

from inferencex.convert.context import beyond_declared, context_length


def test_more_than_the_config_declares_is_remarked_on() -> None:
    config = LlamaConfig(max_position_embeddings=64)
    assert beyond_declared(config, 64) == []
    [remark] = beyond_declared(config, 65)
    assert "--max-model-len 65 is more than the 64 tokens that the config declares" in remark


def test_dynamic_scaling_reaches_further() -> None:
    config = LlamaConfig(max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    assert context_length(config, None) == 128
    assert beyond_declared(config, 128) == []
    assert "128 tokens" in beyond_declared(config, 129)[0]
