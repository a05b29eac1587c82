"""llm-compressor (vLLM's): GPTQ, AWQ, SmoothQuant and FP8 into compressed-tensors checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.accuracy.tools.base import GROUP_SIZE, Logits, Row, Task

_SMOOTHING_STRENGTH = 0.8
_FEW_SAMPLES = 16  # AWQ's time grows with the samples: all of them take most of an hour on two cores


class LlmCompressor:
    """`oneshot` with one recipe a conversion, the modifiers' own defaults but for the group size."""

    name = "llm-compressor"
    settings = f"oneshot, modifiers' defaults, groups of {GROUP_SIZE}, SmoothQuant {_SMOOTHING_STRENGTH}"
    rows = (
        Row("gptq", f"GPTQ W4A16 g{GROUP_SIZE} symmetric", "gptq"),
        Row("awq", f"AWQ W4A16 g{GROUP_SIZE} asymmetric", "awq"),
        Row("awq-16", f"AWQ W4A16 g{GROUP_SIZE} asymmetric, {_FEW_SAMPLES} samples only", "awq-16"),
        Row("w8a8-weights", "SmoothQuant + GPTQ W8A8, weights only", "w8a8"),
        Row("w8a8", "SmoothQuant + GPTQ W8A8, activations int8 per token", "w8a8", "int8"),
        Row("fp8-weights", "FP8 e4m3 per channel, weights only", "fp8", floats=True),
        Row("fp8", "FP8 e4m3 per channel, activations fp8 per token", "fp8", "fp8", floats=True),
    )
    runs_itself = False

    def version(self) -> str:
        from importlib.metadata import version

        import llmcompressor  # noqa: F401

        return f"llmcompressor {version('llmcompressor')}, compressed-tensors {version('compressed-tensors')}"

    def convert(self, conversion: str, task: Task, folder: Path) -> None:
        import torch
        from llmcompressor import oneshot
        from llmcompressor.pipelines.cache import IntermediatesCache
        from transformers import AutoModelForCausalLM

        if not torch.accelerator.is_available():
            # AWQ pins what it caches, for copies to a GPU, and PyTorch refuses that where there is none.
            IntermediatesCache.pin_memory = lambda *arguments, **options: None
        load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
        model = load(task.checkpoint, dtype="auto")
        calibration: dict[str, Any] = {}
        if conversion != "fp8":
            samples = min(task.samples, _FEW_SAMPLES) if conversion.endswith(f"-{_FEW_SAMPLES}") else task.samples
            calibration = {
                "dataset": _dataset(task),
                "max_seq_length": task.length,
                "num_calibration_samples": samples,
                "shuffle_calibration_samples": False,
            }
        oneshot(model=model, tokenizer=str(task.checkpoint), recipe=_recipe(conversion), **calibration)
        model.save_pretrained(folder, save_compressed=True)

    def bits(self, conversion: str, task: Task, folder: Path) -> float:
        from bench.accuracy.plain import stored_bits

        return stored_bits(task.checkpoint, folder)

    def load(self, row: Row, task: Task, folder: Path) -> Logits:
        from bench.accuracy.plain import run_quantized

        return run_quantized(task.checkpoint, folder, row.activations)


def _dataset(task: Task) -> Any:
    from datasets import Dataset

    windows = task.windows().tolist()
    return Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * len(window) for window in windows]})


def _recipe(conversion: str) -> list[Any]:
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform import AWQModifier, SmoothQuantModifier

    def grouped(preset: str) -> dict[str, Any]:
        scheme = preset_name_to_scheme(preset, ["Linear"])
        scheme.weights.group_size = GROUP_SIZE
        return {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}

    def preset(name: str) -> dict[str, Any]:
        return {"targets": "Linear", "scheme": name, "ignore": ["lm_head"]}

    if conversion == "gptq":
        return [GPTQModifier(**grouped("W4A16"))]
    if conversion.startswith("awq"):
        return [AWQModifier(), QuantizationModifier(**grouped("W4A16_ASYM"))]
    if conversion == "w8a8":
        return [SmoothQuantModifier(smoothing_strength=_SMOOTHING_STRENGTH), GPTQModifier(**preset("W8A8"))]
    return [QuantizationModifier(**preset("FP8_DYNAMIC"))]


TOOL = LlmCompressor()
