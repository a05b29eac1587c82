"""InferenceX itself, through its command line and its CPU backend."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.accuracy.tools.base import GROUP_SIZE, Logits, Row, Task

_BUNDLE = "bundle"
_GROUP = f"g{GROUP_SIZE}"

# What follows `inferencex-convert` for each conversion, beside the model, the calibration and the output.
_OPTIONS: dict[str, Sequence[str]] = {
    "rtn-int4": ("--quantization", f"rtn-int4-{_GROUP}"),
    "gptq-int4": ("--quantization", f"gptq-int4-{_GROUP}"),
    "awq-int4": ("--quantization", f"awq-int4-{_GROUP}"),
    "int4": ("--quantization", f"int4-{_GROUP}"),
    "int4-best": ("--quantization", f"int4-{_GROUP}", "--effort", "best"),
    "5.5-bits": ("--quantization", "awq+gptq", "--group-size", str(GROUP_SIZE), "--target-bits", "5.5"),
    "gptq-int8": ("--quantization", "gptq-int8"),
    "smoothquant-int8": ("--quantization", "smoothquant-int8"),
    "smoothquant+gptq-int8": ("--quantization", "smoothquant+gptq-int8"),
    "fp8-weight": ("--quantization", "fp8-weight"),
    "fp8": ("--quantization", "fp8"),
}


def arguments(conversion: str, task: Task, bundle: Path) -> list[str]:
    """Return what `inferencex-convert` is given."""
    given = ["--model-id", str(task.checkpoint), "--output", str(bundle), "--no-verify"]
    given += ["--threads", str(task.threads), *_OPTIONS[conversion]]
    if not conversion.startswith("fp8"):  # its ranges are the weights' own: there is nothing to calibrate
        given += ["--calibration", ",".join(map(str, task.texts))]
        given += ["--calibration-samples", str(task.samples), "--calibration-length", str(task.length)]
    return given


class InferenceX:
    """Bundles by `inferencex-convert`, run by the CPU backend."""

    name = "inferencex"
    settings = "inferencex-convert --no-verify; the bundle runs on the CPU backend with float32 activations"
    rows = (
        Row("rtn-int4", f"rtn-int4 {_GROUP} asymmetric, range search by E[x²]", "rtn-int4"),
        Row("gptq-int4", f"gptq-int4 {_GROUP} asymmetric", "gptq-int4"),
        Row("awq-int4", f"awq-int4 {_GROUP} asymmetric", "awq-int4"),
        Row("int4", f"int4 (awq+gptq) {_GROUP} asymmetric", "int4"),
        Row("int4-best", f"int4 {_GROUP} asymmetric, --effort best", "int4-best"),
        Row("5.5-bits", f"awq+gptq {_GROUP} asymmetric, --target-bits 5.5", "5.5-bits"),
        Row("gptq-int8", "gptq-int8 per channel, weights only", "gptq-int8"),
        Row("smoothquant-int8", "smoothquant-int8, activations int8 per token", "smoothquant-int8", "int8"),
        Row(
            "smoothquant+gptq-int8",
            "smoothquant+gptq-int8, activations int8 per token",
            "smoothquant+gptq-int8",
            "int8",
        ),
        Row("fp8-weight", "fp8-weight, e4m3 per channel", "fp8-weight", floats=True),
        Row("fp8", "fp8, e4m3 per channel, activations fp8 per token", "fp8", "fp8", floats=True),
    )
    runs_itself = False

    def version(self) -> str:
        from importlib.metadata import version

        import inferencex.convert  # noqa: F401

        return f"inferencex {version('inferencex')}"

    def convert(self, conversion: str, task: Task, folder: Path) -> None:
        command = [sys.executable, "-c", "from inferencex.convert.cli import main; main()"]
        command += arguments(conversion, task, folder / _BUNDLE)
        subprocess.run(command, check=True)

    def bits(self, conversion: str, task: Task, folder: Path) -> float:
        from inferencex.formats.bundle import Bundle

        report = json.loads((folder / _BUNDLE / "report.json").read_text(encoding="utf-8"))
        linears = {weight["name"]: weight["parameters"] for weight in report["weights"] if weight["role"] == "linear"}
        taken: int = sum(
            tensor.nbytes
            for name, tensor in Bundle.open(folder / _BUNDLE).stored.items()
            if name in linears or name.rpartition(".")[0] in linears  # values; scales and zero points
        )
        weights: int = sum(linears.values())
        return 8 * taken / weights

    def load(self, row: Row, task: Task, folder: Path) -> Logits:
        from inferencex.runtime.backends import select_backend
        from inferencex.runtime.backends.divergence import whole_sequence_logits, whole_sequence_options

        bundle = folder / _BUNDLE
        options = whole_sequence_options(task.window, "float32", "float32")
        executable = select_backend("cpu", bundle).compile(bundle, options)
        return lambda token_ids: whole_sequence_logits(executable, token_ids)


TOOL = InferenceX()
