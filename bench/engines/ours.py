"""InferenceX itself, through its public API."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.engines.base import Capacity, Prompts
from bench.models import GROUP_SIZE

BACKEND = "INFERENCEX_BENCH_BACKEND"  # environment variable that names the backend; default: "auto"
_BUNDLE = "bundle"


class InferenceX:
    """INT4 weights rounded to nearest, head and embedding INT6 (llama.cpp's Q4_0 has Q6_K there)."""

    name = "inferencex"
    precision = f"int4 g{GROUP_SIZE}"

    @property
    def settings(self) -> str:
        """How it is configured; the backend is the environment's choice."""
        return f"LLM with backend {_backend()!r} and defaults, prefix caching off"

    def version(self) -> str:
        from importlib.metadata import version

        import inferencex.runtime  # noqa: F401

        return f"inferencex {version('inferencex')}"

    def prepare(self, checkpoint: Path, folder: Path) -> None:
        import shutil
        import subprocess

        options = ["--quantization", "rtn-int4", "--group-size", str(GROUP_SIZE), "--embedding", "int6", "--no-verify"]
        command = [sys.executable, "-c", "from inferencex.convert.cli import main; main()"]
        subprocess.run([*command, "--model-id", checkpoint, "--output", folder / _BUNDLE, *options], check=True)
        for file in (folder / _BUNDLE).iterdir():
            shutil.move(file, folder)
        (folder / _BUNDLE).rmdir()

    def load(self, folder: Path, capacity: Capacity) -> _Session:
        return _Session(folder, capacity)


def _backend() -> str:
    return os.environ.get(BACKEND, "auto")


class _Session:
    def __init__(self, folder: Path, capacity: Capacity) -> None:
        from inferencex.runtime import LLM, SamplingParams

        block_size = 16
        self._params = SamplingParams
        self._engine = LLM(
            folder,
            backend=_backend(),
            threads=capacity.threads,
            max_model_len=capacity.max_length,
            max_num_seqs=capacity.max_sequences,
            block_size=block_size,
            num_kv_blocks=-(-capacity.max_tokens // block_size) + capacity.max_sequences,
            enable_prefix_caching=False,
        ).engine
        self._requests = 0

    def generate(self, prompts: Prompts, max_tokens: int) -> Iterator[Sequence[int]]:
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        places = {}
        for place, prompt in enumerate(prompts):
            name = str(self._requests)
            self._requests += 1
            places[name] = place
            self._engine.add_request(name, prompt, params)
        counts = [0] * len(prompts)
        while self._engine.has_unfinished:
            for delta in self._engine.step():
                if delta.output is not None and delta.output.error is not None:
                    raise delta.output.error
                counts[places[delta.request_id]] += len(delta.token_ids)
            yield tuple(counts)


ENGINE = InferenceX()
