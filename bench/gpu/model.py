"""A whole model of random weights on the device: decoding and reading prompts, in the engine's own steps."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.gpu.cases import Sizes
from inferencex.formats.bundle import Bundle
from inferencex.runtime.backends.base import BackendOptions, Draws, StepBatch
from inferencex.runtime.backends.triton.backend import compile_bundle
from inferencex.runtime.backends.triton.devices import Device
from inferencex.runtime.backends.triton.executable import TritonExecutable

_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Measured:
    """Tokens a second of a kind of step, and the bytes of weights, keys and values that one step reads."""

    name: str
    tokens_per_second: float
    steps_per_second: float
    bytes_per_step: int


def make_bundle(sizes: Sizes, layers: int, folder: Path) -> Path:
    """Convert a configuration with random weights to INT4 in groups of 64; what is there already is kept."""
    bundle = folder / f"random-{sizes.hidden}-{layers}-int4"
    if (bundle / "bundle.json").exists():
        return bundle
    checkpoint = folder / f"random-{sizes.hidden}-{layers}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn, "num_hidden_layers": layers, "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim, "vocab_size": sizes.vocab,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }))  # fmt: skip
    command = [
        sys.executable, "-c", "from inferencex.convert.cli import main; main()", "--model-id", str(checkpoint),
        "--random-weights", "--quantization", "rtn-int4", "--output", str(bundle), "--overwrite", "--no-verify",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return bundle


def measure(bundle: Path, sizes: Sizes, steps: int, device: Device, dtype: torch.dtype) -> Iterator[Measured]:
    """Yield decoding of each batch at the sizes' context, and reading prompts."""
    most = max(sizes.batches)
    blocks = -(-(sizes.context + steps + 1) // _BLOCK_SIZE)
    options = BackendOptions(
        num_blocks=most * blocks,
        block_size=_BLOCK_SIZE,
        max_num_seqs=most,
        max_num_batched_tokens=sizes.prompt,
        max_model_len=blocks * _BLOCK_SIZE,
        activation_dtype=str(dtype).removeprefix("torch."),
    )
    executable = compile_bundle(Bundle.open(bundle), options, device)
    for layer in range(executable.facts.num_layers):  # what is read must be numbers
        pages = executable.pool(layer)
        pages.keys.zero_()
        pages.values.zero_()
    weights = sum(file.stat().st_size for file in bundle.glob("*.safetensors"))
    embedding = 2 * sizes.vocab * sizes.hidden  # of which a step reads a row for each token
    for batch in sizes.batches:
        rate = _decode(executable, batch, blocks, sizes, steps)
        read = weights - embedding + batch * sizes.context * executable.facts.bytes_per_token
        yield Measured(f"decode x{batch} at {sizes.context} tokens", batch * rate, rate, read)
    rate = _prefill(executable, blocks, sizes)
    yield Measured(f"prefill of {sizes.prompt} tokens", sizes.prompt * rate, rate, weights - embedding)


def _tables(sequences: int, blocks: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    return np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks)


def _greedy(rows: int) -> Draws:
    zeros, ones = np.zeros(rows), np.ones(rows)
    return Draws(zeros, np.zeros(rows, np.int32), ones, zeros, zeros)


def _decode(executable: TritonExecutable, sequences: int, blocks: int, sizes: Sizes, steps: int) -> float:
    """Return steps a second, each launched behind the one before; the pages hold what they hold."""
    rows = np.arange(sequences, dtype=np.int32)
    previous, started = None, 0.0
    warm = max(1, steps // 8)
    for place in range(steps + warm):
        if place == warm:
            assert previous is not None
            previous.result()
            started = time.perf_counter()
        context = sizes.context - steps - warm + place + 1
        batch = StepBatch(
            token_ids=np.ones(sequences, np.int32),
            positions=np.full(sequences, context - 1, np.int32),
            sequence_offsets=np.arange(sequences + 1, dtype=np.int32),
            context_lengths=np.full(sequences, context, np.int32),
            block_tables=_tables(sequences, blocks),
            logit_rows=rows,
            prompt_lengths=np.full(sequences, context, np.int32),
        )
        previous = executable.launch(batch, _greedy(sequences), previous, None if previous is None else rows)
    assert previous is not None
    previous.result()
    return steps / (time.perf_counter() - started)


def _prefill(executable: TritonExecutable, blocks: int, sizes: Sizes, repeats: int = 3) -> float:
    """Return prompts a second; the fastest of a few."""
    count = sizes.prompt
    batch = StepBatch(
        token_ids=np.ones(count, np.int32),
        positions=np.arange(count, dtype=np.int32),
        sequence_offsets=np.array([0, count], np.int32),
        context_lengths=np.array([count], np.int32),
        block_tables=_tables(1, blocks),
        logit_rows=np.array([count - 1], np.int32),
        prompt_lengths=np.full(count, count, np.int32),
    )
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        executable.launch(batch, _greedy(1)).result()
        times.append(time.perf_counter() - started)
    return 1 / min(times)
