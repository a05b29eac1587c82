"""GGUF files: every tensor decoded by the `gguf` package, and what llama.cpp makes of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import ExportError
from inferencex.formats.export import export_bundle
from inferencex.runtime.text import Tokenizer
from tests.formats.export import models
from tests.formats.export.conftest import Bundles

KINDS = gguf.GGMLQuantizationType
TEXTS = ["Once upon a time", "isn't it 1234?\n\n  x", "Größe 東京 🙂", "<s>hello</s> there"]


def _tensors(path: Path) -> dict[str, tuple[Any, NDArray[np.float32]]]:
    """Name, type and values of every tensor."""
    return {
        tensor.name: (tensor.tensor_type, gguf.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
    }


def _neighbours(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Interleave the halves of each head, one row at a time."""
    size = len(rows) // heads
    return np.stack([rows[h * size + (i % 2) * (size // 2) + i // 2] for h in range(heads) for i in range(size)])


@pytest.mark.parametrize(
    ("quantization", "options", "kind"),
    [
        ("rtn-int4-g32", {"symmetric": True}, KINDS.Q4_0),
        ("rtn-int4-g32", {"symmetric": False}, KINDS.Q4_1),
        ("rtn-int8", {"symmetric": True}, KINDS.Q8_0),
        ("rtn-int8-g32", {"symmetric": False}, KINDS.F32),
    ],
)
def test_blocks_say_what_the_bundle_says(
    bundles: Bundles, tmp_path: Path, quantization: str, options: dict[str, bool], kind: Any
) -> None:
    path = bundles("llama", quantization, **options)
    done = export_bundle(path, "gguf", tmp_path / "model.gguf")
    found, opened = _tensors(tmp_path / "model.gguf"), Bundle.open(path)
    names = {"attn_v": "self_attn.v_proj", "ffn_down": "mlp.down_proj", "ffn_up": "mlp.up_proj"}
    pairs = {
        f"blk.1.{ours}.weight": models.weight(opened, f"model.layers.1.{theirs}.weight")
        for ours, theirs in names.items()
    }
    for name, theirs, heads in (("attn_q", "self_attn.q_proj", 4), ("attn_k", "self_attn.k_proj", 2)):
        pairs[f"blk.1.{name}.weight"] = _neighbours(models.weight(opened, f"model.layers.1.{theirs}.weight"), heads)
    for name, expected in pairs.items():
        stored, values = found[name]
        assert stored == kind
        error = np.linalg.norm(values - expected) / np.linalg.norm(expected)
        assert error < 1e-3 if kind == KINDS.Q4_1 else error < 1e-7, name
    assert any("Q4_1" in note for note in done.notes) == (kind == KINDS.Q4_1)
    assert any("float32" in note for note in done.notes) == (kind == KINDS.F32)


def test_plain_weights_and_norms(bundles: Bundles, tmp_path: Path) -> None:
    path = bundles("qwen3", "rtn-int4-g32")
    export_bundle(path, "gguf", tmp_path / "model.gguf")
    found, opened = _tensors(tmp_path / "model.gguf"), Bundle.open(path)
    kind, values = found["token_embd.weight"]
    assert kind == KINDS.BF16
    assert np.array_equal(values, opened.tensor("model.embed_tokens.weight").astype(np.float32))
    kind, values = found["blk.0.attn_q_norm.weight"]
    assert kind == KINDS.F32
    assert np.array_equal(values, opened.tensor("model.layers.0.self_attn.q_norm.weight"))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": False}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen3", {}),
    ],
)
def test_llama_cpp_computes_the_same(bundles: Bundles, tmp_path: Path, name: str, overrides: dict[str, Any]) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = bundles(name, "rtn-int8", overrides=overrides)
    export_bundle(path, "gguf", tmp_path / "model.gguf")
    model = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    model.eval(models.IDS)
    log_q = models.log_softmax(model.scores[: len(models.IDS)])
    # llama.cpp quantizes activations to 8 bits; a wrong order of rows or a missing bias is a hundred times as far off.
    assert models.divergence(models.computed(path), log_q) < 5e-3
    tokenizer = Tokenizer.load(path)
    for text in TEXTS:
        expected = tokenizer.encode(text)
        assert model.tokenize(text.encode(), add_bos=False, special=True) == expected, text
    assert model.metadata["tokenizer.chat_template"].startswith("{% for m in messages %}")


def test_sentencepiece_tokens(bundles: Bundles, tmp_path: Path, shared_data: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = models.bundle(shared_data / "stories260k", tmp_path / "bundle", "rtn-int8")
    export_bundle(path, "gguf", tmp_path / "model.gguf")
    model = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=64, verbose=False, n_threads=1)
    tokenizer = Tokenizer.load(path)
    for text in ("Once upon a time, there was a girl.", "  two  spaces\nand\tmore", "naïve 東京 🙂"):
        assert model.tokenize(text.encode(), add_bos=True, special=True) == tokenizer.encode(text)


def test_what_llama_cpp_computes_differently_is_refused(bundles: Bundles, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="not for gemma2"):
        export_bundle(bundles("gemma2", "rtn-int8"), "gguf", tmp_path / "model.gguf")
    scaled = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
    with pytest.raises(ExportError, match="RoPE is scaled"):
        export_bundle(bundles("qwen2", "rtn-int8", overrides=scaled), "gguf", tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())
