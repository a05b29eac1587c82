"""ONNX Runtime GenAI."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.engines.base import Capacity, Prompts


class OnnxRuntimeGenAi:
    """INT4 weights as its model builder makes them for a CPU."""

    name = "onnxruntime-genai"
    precision = "int4 g32"
    settings = "the builder's defaults for a CPU (activations int8), head pruned to the last row, batch generator"

    def version(self) -> str:
        from importlib.metadata import version

        import onnxruntime  # noqa: F401
        import onnxruntime_genai  # noqa: F401

        return f"onnxruntime-genai {version('onnxruntime-genai')}, onnxruntime {version('onnxruntime')}"

    def prepare(self, checkpoint: Path, folder: Path) -> None:
        import shutil
        import subprocess

        scratch = folder / "scratch"
        options = ["-i", str(checkpoint), "-o", str(folder), "-p", "int4", "-e", "cpu", "-c", str(scratch)]
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *options]
        subprocess.run([*command, "--extra_options", "prune_lm_head=true"], check=True)
        shutil.rmtree(scratch, ignore_errors=True)

    def load(self, folder: Path, capacity: Capacity) -> _Session:
        return _Session(folder, capacity)


class _Session:
    def __init__(self, folder: Path, capacity: Capacity) -> None:
        import numpy
        import onnxruntime_genai

        self._numpy: Any = numpy
        self._genai: Any = onnxruntime_genai
        config = onnxruntime_genai.Config(str(folder))
        session = {"intra_op_num_threads": capacity.threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = onnxruntime_genai.Model(config)

    def generate(self, prompts: Prompts, max_tokens: int) -> Iterator[Sequence[int]]:
        params = self._genai.GeneratorParams(self._model)
        length = len(prompts[0]) + max_tokens
        params.set_search_options(do_sample=False, batch_size=len(prompts), max_length=length, min_length=length)
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(self._numpy.array(prompts, dtype=self._numpy.int32))
        for made in range(1, max_tokens + 1):
            generator.generate_next_token()
            yield (made,) * len(prompts)


ENGINE = OnnxRuntimeGenAi()
