"""Arrays that lie in memory in various ways, and operations run on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from onnx import helper
from onnx.reference import ReferenceEvaluator

from tests.runtime.backends.cpu.operations import run_operation

Array = NDArray[Any]
Spec = tuple[Sequence[int], DTypeLike]

LAYOUTS = ("contiguous", "transposed", "spaced", "padded")


def laid_out(array: Array, layout: str) -> Array:
    """Return the same elements, in memory that lies as `layout` says."""
    if layout == "contiguous" or array.ndim == 0:
        return np.array(array, order="C")
    if layout == "transposed":
        return np.ascontiguousarray(array.T).T
    *outer, last = array.shape
    if layout == "spaced":
        view = np.zeros((*outer, 2 * last), array.dtype)[..., ::2]
    else:
        view = np.zeros((*outer, last + 3), array.dtype)[..., 1 : last + 1]
    view[...] = array
    return view


def run(
    kind: str,
    inputs: Sequence[Array | None],
    outputs: Sequence[Spec],
    attributes: Mapping[str, Any] | None = None,
    output_layout: str = "contiguous",
) -> list[Array]:
    """Return what an operation computes; it must not depend on the number of threads, bit for bit."""
    results = []
    for threads in (1, 3):
        arrays = [laid_out(np.zeros(shape, dtype), output_layout) for shape, dtype in outputs]
        run_operation(kind, inputs, arrays, dict(attributes or {}), threads=threads)
        results.append(arrays)
    for one, several in zip(*results, strict=True):
        assert one.tobytes() == several.tobytes()
    return results[0]


def onnx_outputs(
    kind: str, inputs: Sequence[Array | None], attributes: Mapping[str, Any], count: int = 1
) -> list[Array]:
    """Return what ONNX's own implementation of an operator computes."""
    names = ["" if array is None else f"x{i}" for i, array in enumerate(inputs)]
    node = helper.make_node(kind, names, [f"y{i}" for i in range(count)], **attributes)
    feeds = {name: array for name, array in zip(names, inputs, strict=True) if name}
    return [np.asarray(y) for y in ReferenceEvaluator(node).run(None, feeds)]
