"""OpenVINO GenAI with continuous batching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.engines.base import Capacity, Prompts
from bench.models import GROUP_SIZE

_BLOCK = 32  # tokens of a KV block of the CPU plug-in


class OpenVino:
    """INT4 weights by NNCF, head and embedding INT8."""

    name = "openvino"
    precision = f"int4 g{GROUP_SIZE}"
    settings = "ContinuousBatchingPipeline, 512 tokens a step, the plug-in's defaults (KV int8, activations int8)"

    def version(self) -> str:
        from importlib.metadata import version

        import nncf  # noqa: F401
        import openvino_genai  # noqa: F401

        return f"openvino-genai {version('openvino-genai')}, nncf {version('nncf')}"

    def prepare(self, checkpoint: Path, folder: Path) -> None:
        """Let OpenVINO build its graph from a float16 GGUF file, and NNCF compress that."""
        import nncf
        import openvino
        import openvino_genai

        from bench.engines.gguf_writer import write_gguf

        scratch = folder / "scratch"
        scratch.mkdir()
        write_gguf(checkpoint, scratch / "float16.gguf")
        openvino_genai.LLMPipeline(str(scratch / "float16.gguf"), "CPU", enable_save_ov_model=True)
        model = nncf.compress_weights(
            openvino.Core().read_model(scratch / "openvino_model.xml"),
            mode=nncf.CompressWeightsMode.INT4_ASYM,
            group_size=GROUP_SIZE,
            ratio=1.0,
        )
        openvino.save_model(model, folder / "openvino_model.xml")
        for side_file in scratch.glob("openvino_*tokenizer.*"):
            side_file.rename(folder / side_file.name)
        del model
        for left in scratch.iterdir():
            left.unlink()
        scratch.rmdir()

    def load(self, folder: Path, capacity: Capacity) -> _Session:
        return _Session(folder, capacity)


class _Session:
    def __init__(self, folder: Path, capacity: Capacity) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._numpy: Any = numpy
        self._openvino: Any = openvino
        self._genai: Any = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = -(-capacity.max_tokens // _BLOCK) + capacity.max_sequences
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = capacity.max_sequences
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": capacity.threads}
        )
        self._requests = 0

    def generate(self, prompts: Prompts, max_tokens: int) -> Iterator[Sequence[int]]:
        config = self._genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        handles = []
        for prompt in prompts:
            ids = self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
            handles.append(self._pipeline.add_request(self._requests, ids, config))
            self._requests += 1
        counts = [0] * len(prompts)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for place, handle in enumerate(handles):
                while handle.can_read():
                    counts[place] += sum(len(output.generated_ids) for output in handle.read().values())
            yield tuple(counts)


ENGINE = OpenVino()
