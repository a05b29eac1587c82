"""NNCF: weights of an OpenVINO graph compressed on data; OpenVINO runs what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.accuracy.tools.base import GROUP_SIZE, Logits, Row, Task

_FILE = "model.xml"
# The graph as it is written: no activations in INT8, nothing in half precision.
_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


class Nncf:
    """INT4 with AWQ and scale estimation on all of the calibration."""

    name = "nncf"
    settings = "compress_weights of the traced graph, ratio 1, no backup precision, subset_size = samples"
    rows = (Row("awq", f"INT4_ASYM g{GROUP_SIZE}, AWQ, scale estimation", "awq"),)
    runs_itself = True

    def version(self) -> str:
        from importlib.metadata import version

        import nncf  # noqa: F401
        import openvino  # noqa: F401

        return f"nncf {version('nncf')}, openvino {version('openvino')}"

    def convert(self, conversion: str, task: Task, folder: Path) -> None:
        import nncf
        import openvino

        windows = task.windows()
        compressed = nncf.compress_weights(
            _traced(task.checkpoint, windows[0]),
            mode=nncf.CompressWeightsMode.INT4_ASYM,
            group_size=GROUP_SIZE,
            ratio=1.0,
            backup_mode=nncf.BackupMode.NONE,
            dataset=nncf.Dataset([window[None] for window in windows]),
            subset_size=len(windows),
            awq=True,
            scale_estimation=True,
        )
        openvino.save_model(compressed, folder / _FILE, compress_to_fp16=False)

    def bits(self, conversion: str, task: Task, folder: Path) -> float:
        import openvino

        taken = weights = 0
        for node in openvino.Core().read_model(folder / _FILE).get_ops():
            if node.get_type_name() == "MatMul":
                constants = _constants_of(node.input_value(1).get_node())
                if any(constant.get_element_type() in (openvino.Type.u4, openvino.Type.i4) for constant in constants):
                    taken += sum(constant.get_byte_size() for constant in constants)
                    weights += max(_elements(constant) for constant in constants)
        return 8 * taken / weights

    def load(self, row: Row, task: Task, folder: Path) -> Logits:
        import openvino

        model = openvino.Core().compile_model(folder / _FILE, "CPU", {**_EXACT, "INFERENCE_NUM_THREADS": task.threads})

        def run(token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
            logits: NDArray[np.float32] = model([token_ids[None]])[0][0]
            return logits

        return run


def _traced(checkpoint: Path, token_ids: NDArray[np.int64]) -> Any:
    """Return the OpenVINO graph of a checkpoint in float32: token ids `[1, T]` -> logits `[1, T, vocab]`."""
    import openvino
    import torch
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = load(checkpoint, dtype=torch.float32).eval()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            # With a mask, transformers does not look for several texts in one sequence, which OpenVINO cannot do.
            mask = torch.ones_like(input_ids)
            logits: torch.Tensor = self.model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
            return logits

    return openvino.convert_model(Whole(), example_input={"input_ids": torch.from_numpy(token_ids)[None]})


def _constants_of(node: Any) -> list[Any]:
    """Return the constants that a weight is computed from, its shape not among them; none where it is computed."""
    if node.get_type_name() == "Constant":
        return [node]
    if node.get_type_name() not in ("Convert", "Subtract", "Multiply", "Reshape", "Transpose"):
        return []
    inputs = node.input_values()
    if node.get_type_name() in ("Reshape", "Transpose"):
        inputs = inputs[:1]
    return [constant for value in inputs for constant in _constants_of(value.get_node())]


def _elements(constant: Any) -> int:
    return int(np.prod(list(constant.get_output_shape(0))))


TOOL = Nncf()
