"""llama.cpp's own quantization through llama-cpp-python, with and without an importance matrix."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.accuracy.tools.base import Logits, Row, Task

_FILE = "model.gguf"
_TYPES = {"q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0", "q4_k_m": "LLAMA_FTYPE_MOSTLY_Q4_K_M"}
_WITH_IMPORTANCE = "+imatrix"
_F16 = 1  # GGML_TYPE_F16


class LlamaCpp:
    """The importance matrix is E[x²] of each linear's inputs over the calibration, as llama-imatrix collects it.

    llama-cpp-python has no llama-imatrix: the means are found by running the checkpoint in PyTorch, whose time counts.
    """

    name = "llama.cpp"
    settings = "llama_model_quantize, embedding float16; importance found by PyTorch on the same calibration"
    rows = (
        Row("q4_0", "Q4_0", "q4_0"),
        Row("q4_0+imatrix", "Q4_0, importance matrix", "q4_0+imatrix"),
        Row("q4_k_m", "Q4_K_M (mixed)", "q4_k_m"),
        Row("q4_k_m+imatrix", "Q4_K_M (mixed), importance matrix", "q4_k_m+imatrix"),
    )
    runs_itself = False

    def version(self) -> str:
        from importlib.metadata import version

        import llama_cpp  # noqa: F401

        return f"llama-cpp-python {version('llama-cpp-python')}"

    def convert(self, conversion: str, task: Task, folder: Path) -> None:
        import llama_cpp

        from bench.engines.gguf_writer import write_gguf

        whole = folder / "float16.gguf"
        write_gguf(task.checkpoint, whole)
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, _TYPES[conversion.removesuffix(_WITH_IMPORTANCE)])
        params.nthread = task.threads
        params.token_embedding_type = _F16
        if conversion.endswith(_WITH_IMPORTANCE):
            importance = _importance(task)
            params.imatrix = _as_argument(llama_cpp, importance)
        status = llama_cpp.llama_model_quantize(str(whole).encode(), str(folder / _FILE).encode(), ctypes.byref(params))
        if status != 0:
            raise RuntimeError(f"llama_model_quantize of {whole} ended with status {status}; expected 0")
        whole.unlink()

    def bits(self, conversion: str, task: Task, folder: Path) -> float:
        from bench.accuracy.plain import stored_bits

        return stored_bits(task.checkpoint, folder / _FILE)

    def load(self, row: Row, task: Task, folder: Path) -> Logits:
        from bench.accuracy.plain import run_quantized

        return run_quantized(task.checkpoint, folder / _FILE, row.activations)


def _importance(task: Task) -> dict[str, NDArray[np.float32]]:
    """Return E[x²], float32 `[K]`, by the GGUF name of each weight."""
    from bench.accuracy.plain import load_model, mean_squares
    from bench.engines.gguf_writer import gguf_name

    found = mean_squares(load_model(task.checkpoint), task.windows())
    return {gguf_name(f"{name}.weight"): values for name, values in found.items()}


def _as_argument(api: Any, importance: dict[str, NDArray[np.float32]]) -> Any:
    """Return the array that llama.cpp reads, which ends with an entry without a name; it refers to `importance`."""
    entries = (api.llama_model_imatrix_data * (len(importance) + 1))()
    for entry, (name, values) in zip(entries, importance.items(), strict=False):
        entry.name = name.encode()
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = values.size
    return entries


TOOL = LlamaCpp()
