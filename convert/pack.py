"""Write the weights of a graph into a bundle, one at a time, each in the format the plan says.

The graph gains what reads the stored form: a DequantizeLinear for quantized weights, a Cast for those kept in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferencex.convert.passes.editing import WEIGHT, Editor, is_weight
from inferencex.convert.passes.weights import WeightExpression, expression_of
from inferencex.convert.quantize import TensorPlan, method_named
from inferencex.convert.source.parameter import ParameterSource
from inferencex.formats.bundle import BundleWriter
from inferencex.formats.errors import QuantizationError

_IR_TYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
}
_FLOAT16_MAX = torch.finfo(torch.float16).max
_CHUNK_ELEMENTS = 1 << 24  # plain tensors are converted and written this many elements at a time


@dataclass(frozen=True)
class PackedWeight:
    """How one weight was stored.

    relative_error: norm of the quantization error over the norm of the weight; 0 for plain weights.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    format: str
    relative_error: float
    parameters: int


Progress = Callable[[str, int], None]


def numpy_of(tensor: Tensor) -> NDArray[np.generic]:
    """View a tensor as an array; bfloat16 as ml_dtypes' type of that name."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        array: NDArray[np.generic] = tensor.view(torch.uint16).numpy().view(ir.DataType.BFLOAT16.numpy())
        return array
    result: NDArray[np.generic] = tensor.numpy()
    return result


class WeightPacker:
    """Packs the weights of `model` as planned; `sources` says where parameters come from."""

    def __init__(
        self,
        model: ir.Model,
        plans: Sequence[TensorPlan],
        sources: Mapping[str, ParameterSource],
        dtype: torch.dtype | None,
    ) -> None:
        self.graph = model.graph
        self.edit = Editor(model.graph)
        self.places = {node: place for place, node in enumerate(model.graph)}  # of nodes that may read a weight
        self.plans = {plan.name: plan for plan in plans if plan.is_stored}
        self.sources = sources
        self.dtype = dtype

    def run(self, writer: BundleWriter, progress: Progress, threads: int | None = None) -> list[PackedWeight]:
        """Store every weight in the order of the graph; `progress(name, elements)` is called after each."""
        weights = [(name, value) for name, value in self.graph.initializers.items() if is_weight(value)]
        packed = []
        with ThreadPoolExecutor(1) as reader:  # reads and computes the next weight while this one is quantized
            ahead = [reader.submit(self.evaluate, value) for _, value in weights[:1]]
            for index, (name, value) in enumerate(weights):
                tensor = ahead.pop().result()
                ahead += [reader.submit(self.evaluate, following) for _, following in weights[index + 1 : index + 2]]
                packed.append(self._pack(writer, name, value, tensor, threads))
                del tensor
                progress(name, packed[-1].parameters)
        return packed

    def evaluate(self, value: ir.Value) -> Tensor:
        """Compute a weight from the checkpoint."""
        return expression_of(value).evaluate(lambda name: self.sources[name].load())

    def _pack(
        self, writer: BundleWriter, name: str, value: ir.Value, tensor: Tensor, threads: int | None
    ) -> PackedWeight:
        plan = self.plans.get(name)
        role = plan.role if plan is not None else "other"
        shape = tuple(tensor.shape)
        if not _is_finite(tensor):
            raise QuantizationError(f"{name}: the checkpoint holds values that are not finite (NaN or infinity)")
        if plan is None or plan.scheme is None:
            stored = self._store_plain(writer, name, value, tensor)
            return PackedWeight(name, shape, role, str(stored), 0.0, tensor.numel())
        weight = numpy_of(tensor if tensor.dtype in _IR_TYPES else tensor.to(torch.float32))
        result = method_named(plan.method).quantize(name, weight, plan.scheme, threads=threads)
        del tensor, weight
        writer.add_quantized(name, result.tensor, method=plan.method)
        dtype = ir.DataType(result.tensor.dtype)
        self._insert_dequantize(name, value, result.tensor.attributes, dtype, result.tensor.zero_points is not None)
        return PackedWeight(name, shape, role, str(plan.scheme), result.relative_error, int(np.prod(shape)))

    def _store_plain(self, writer: BundleWriter, name: str, value: ir.Value, tensor: Tensor) -> torch.dtype:
        """Store vectors as float32 and matrices in the dtype asked for; integers as they are."""
        wanted = tensor.dtype
        if tensor.is_floating_point():
            wanted = torch.float32 if tensor.dim() < 2 else self.dtype or tensor.dtype
            wanted = wanted if wanted in _IR_TYPES else torch.float32
        if wanted == torch.float16 and tensor.numel() and (largest := float(tensor.abs().max())) > _FLOAT16_MAX:
            raise QuantizationError(
                f"{name}: the value {largest:.4g} does not fit float16 (largest {_FLOAT16_MAX:g}); use --dtype bfloat16"
            )
        dtype = _IR_TYPES.get(
            wanted, ir.DataType.INT64 if tensor.dtype == torch.int64 else ir.DataType.from_numpy(numpy_of(tensor).dtype)
        )
        writer.add_tensor(name, _chunks(tensor, wanted), dtype, tensor.shape)
        value.dtype = dtype
        del value.meta[WEIGHT]
        if wanted in (torch.float16, torch.bfloat16):
            self._insert_before_users(value, "Cast", [value], {"to": ir.DataType.FLOAT.value})
        return wanted

    def _insert_dequantize(
        self, name: str, value: ir.Value, attributes: Mapping[str, int], dtype: ir.DataType, has_zero_points: bool
    ) -> None:
        def beside(suffix: str) -> ir.Value:
            companion = ir.Value(name=f"{name}.{suffix}")
            self.graph.initializers[f"{name}.{suffix}"] = companion
            return companion

        inputs = [value, beside("scales"), *([beside("zero_points")] if has_zero_points else [])]
        value.dtype = dtype
        del value.meta[WEIGHT]
        self._insert_before_users(
            value, "DequantizeLinear", inputs, {**attributes, "output_dtype": ir.DataType.FLOAT.value}
        )

    def _insert_before_users(
        self, value: ir.Value, op_type: str, inputs: Sequence[ir.Value], attributes: Mapping[str, int]
    ) -> None:
        """Let all readers of a stored weight read it through one node."""
        users = list(value.uses())
        node = self.edit.node(op_type, list(inputs), attributes, shape=value.shape, stem=f"{value.name}.float")
        node.name = node.outputs[0].name
        self.graph.insert_before(min((u.node for u in users), key=self.places.__getitem__), [node])
        for use in users:
            use.node.replace_input_with(use.idx, node.outputs[0])


def _is_finite(tensor: Tensor) -> bool:
    """Tell whether all numbers are finite; NaN comes through a maximum as NaN."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _chunks(tensor: Tensor, dtype: torch.dtype) -> Iterator[NDArray[np.generic]]:
    """Yield a tensor's rows converted to `dtype`, some at a time."""
    if tensor.dim() == 0 or tensor.numel() <= _CHUNK_ELEMENTS:
        yield numpy_of(tensor.to(dtype))
        return
    rows = max(1, _CHUNK_ELEMENTS // max(1, tensor[0].numel()))
    for start in range(0, tensor.shape[0], rows):
        yield numpy_of(tensor[start : start + rows].to(dtype))


def parameters_read(model: ir.Model) -> set[str]:
    """Name every source parameter that some weight of the graph is computed from."""
    expressions: list[WeightExpression] = [expression_of(v) for v in model.graph.initializers.values() if is_weight(v)]
    return {name for expression in expressions for name in expression.parameters}
