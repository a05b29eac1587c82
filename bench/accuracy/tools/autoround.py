"""AutoRound (Intel's): rounding learned by signed gradients, into a GPTQ checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.accuracy.tools.base import GROUP_SIZE, Logits, Row, Task

_ITERATIONS = {"iterations-0": 0, "iterations-50": 50}


class AutoRound:
    """W4A16 with its defaults but for group size and the number of steps."""

    name = "autoround"
    settings = "W4A16, symmetric (its default), steps as named, all else its defaults"
    rows = (
        Row("iterations-0", f"W4A16 g{GROUP_SIZE} symmetric, 0 steps (RTN, ranges searched)", "iterations-0"),
        Row("iterations-50", f"W4A16 g{GROUP_SIZE} symmetric, 50 steps", "iterations-50"),
    )
    runs_itself = False

    def version(self) -> str:
        from importlib.metadata import version

        import auto_round  # noqa: F401

        return f"auto-round {version('auto-round')}"

    def convert(self, conversion: str, task: Task, folder: Path) -> None:
        import torch
        from auto_round import AutoRound as Quantizer
        from transformers import AutoModelForCausalLM, AutoTokenizer

        load: Any = AutoModelForCausalLM.from_pretrained
        windows = torch.from_numpy(task.windows())
        quantizer = Quantizer(
            load(task.checkpoint, dtype="auto"),
            AutoTokenizer.from_pretrained(task.checkpoint),
            scheme="W4A16",
            group_size=GROUP_SIZE,
            iters=_ITERATIONS[conversion],
            dataset=[{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in windows],
            nsamples=task.samples,
            seqlen=task.length,
            device_map="cpu",
        )
        quantizer.quantize_and_save(str(folder), format="auto_gptq")

    def bits(self, conversion: str, task: Task, folder: Path) -> float:
        from bench.accuracy.plain import stored_bits

        return stored_bits(task.checkpoint, _written(folder))

    def load(self, row: Row, task: Task, folder: Path) -> Logits:
        from bench.accuracy.plain import run_quantized

        return run_quantized(task.checkpoint, _written(folder), row.activations)


def _written(folder: Path) -> Path:
    """Return the folder of the checkpoint, which may be one below the folder asked for."""
    return next(folder.rglob("config.json")).parent


TOOL = AutoRound()
