"""Tiny checkpoints with a tokenizer, bundles of them, and what a bundle computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize import parse_scheme
from inferencex.formats.bundle import Bundle
from inferencex.formats.packing import QuantizedTensor
from inferencex.recipes.compare import log_probabilities
from inferencex.runtime.backends import select_backend
from inferencex.runtime.backends.base import BackendOptions
from tests.architectures import zoo
from tests.smollm2 import Quiet

VOCAB = 320
IDS = [1, 17, 200, 41, 5, 99, 100, 17, 8, 300, 42, 42, 7, 250]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
TEXTS = [
    "Once upon a time there was a little girl who didn't like the rain.",
    "Water boils at 100 degrees; 1234567890 is a number.\n\n  Indented, isn't it?",
    "Größe, naïve café: 東京は日本の首都です。",
] * 4


def checkpoint(folder: Path, name: str = "llama", **overrides: Any) -> Path:
    """Save a tiny model and a byte-level tokenizer as their authors would."""
    model = zoo.tiny_model(name, **{**SIZES, **overrides}).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 10, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    ).save_pretrained(folder)
    return folder


def bundle(source: Path, output: Path, quantization: str, **options: Any) -> Path:
    """Convert a checkpoint; `options` are those of `parse_scheme`."""
    scheme = parse_scheme(quantization, **options)
    convert(ConvertOptions(str(source), output, scheme, verify=False), Quiet())
    return output


def computed(path: Path, token_ids: Sequence[int] = IDS) -> NDArray[np.float64]:
    """Return the log probabilities of a sequence by the reference backend, float64 `[T, vocab]`."""
    options = BackendOptions(num_blocks=8, block_size=16, max_num_batched_tokens=len(token_ids))
    return log_probabilities(select_backend("reference", path).compile(path, options), token_ids)


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    shifted: NDArray[np.float64] = logits.astype(np.float64)
    shifted = shifted - shifted.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def divergence(log_p: NDArray[np.float64], log_q: NDArray[np.float64]) -> float:
    """Return the mean KL divergence in nats per token."""
    return float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())


def stored(opened: Bundle, part: str) -> tuple[QuantizedTensor, slice]:
    """Return the stored weight that a parameter is part of, and its rows there; read from names and shapes alone."""
    for name in opened.manifest.quantization:
        parts = name.split("+")
        if part in parts:
            heights = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "gate_proj": 96, "up_proj": 96}
            tensor = opened.quantized(name)
            if len(parts) == 1:
                return tensor, slice(0, tensor.shape[0])
            start = sum(heights[p.split(".")[-2]] for p in parts[: parts.index(part)])
            return tensor, slice(start, start + heights[part.split(".")[-2]])
    raise AssertionError(f"{part} is in no quantized tensor")


def weight(opened: Bundle, part: str) -> NDArray[np.float64]:
    """Return a quantized parameter as the bundle has it, float64 `[out, in]`."""
    tensor, rows = stored(opened, part)
    return tensor.dequantize().astype(np.float64)[rows]
