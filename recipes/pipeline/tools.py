"""The versions of the programs that steps run: part of what their outputs depend on."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

CONVERTING = ("inferencex", "numpy", "onnx", "onnx-ir", "onnxscript", "torch", "transformers")
EVALUATING = ("inferencex", "lm-eval", "numpy")
EXPORTING = ("inferencex", "gguf", "numpy", "onnx", "onnx-ir", "safetensors")


def versions(names: Sequence[str]) -> dict[str, str]:
    """Return the installed versions of distributions, those that are not installed left out."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
