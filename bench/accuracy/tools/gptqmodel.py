"""GPTQModel: GPTQ with its defaults."""

from __future__ import annotations

from pathlib import Path

from bench.accuracy.tools.base import GROUP_SIZE, Logits, Row, Task


class GptqModel:
    """Four bits, symmetric, in groups of `GROUP_SIZE`; the rest as the package does it."""

    name = "gptqmodel"
    settings = f"QuantizeConfig(bits=4, group_size={GROUP_SIZE}) and its defaults, on the CPU, one sample a batch"
    rows = (Row("gptq", f"GPTQ 4-bit g{GROUP_SIZE} symmetric", "gptq"),)
    runs_itself = False

    def version(self) -> str:
        from importlib.metadata import version

        import gptqmodel  # noqa: F401

        return f"gptqmodel {version('gptqmodel')}"

    def convert(self, conversion: str, task: Task, folder: Path) -> None:
        import os

        # Its default is half of the processors, and its pool refuses to be made of one thread.
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(task.threads, 2)))
        from gptqmodel import GPTQModel, QuantizeConfig

        model = GPTQModel.load(str(task.checkpoint), QuantizeConfig(bits=4, group_size=GROUP_SIZE), device="cpu")
        samples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in task.windows().tolist()]
        model.quantize(samples, batch_size=1)
        model.save(str(folder))

    def bits(self, conversion: str, task: Task, folder: Path) -> float:
        from bench.accuracy.plain import stored_bits

        return stored_bits(task.checkpoint, folder)

    def load(self, row: Row, task: Task, folder: Path) -> Logits:
        from bench.accuracy.plain import run_quantized

        return run_quantized(task.checkpoint, folder, row.activations)


TOOL = GptqModel()
