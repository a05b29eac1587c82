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

from inferencex.convert.calibrate.result import CalibratedWeight, CalibratedWeights
from inferencex.convert.keep_packed import KeptWeight, Packing, reorder_inputs
from inferencex.convert.origins import origin_of
from inferencex.convert.passes.editing import WEIGHT, Editor, is_weight
from inferencex.convert.passes.weights import WeightExpression, expression_of
from inferencex.convert.quantize import TensorPlan, method_named
from inferencex.convert.source.parameter import ParameterSource
from inferencex.convert.stored_forms import StoredForms
from inferencex.formats.bundle import BundleWriter
from inferencex.formats.bundle.origins import WeightOrigin
from inferencex.formats.errors import QuantizationError
from inferencex.formats.packing import QuantizedTensor

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
    """Packs the weights of `model` as planned; `sources` says where parameters come from.

    `packing` names the weights that are quantized already and kept as they are. `dequantized` says, after `run`, which
    of them could not be, and why. `calibrated` has the weights that calibration quantized or changed.
    """

    def __init__(
        self,
        model: ir.Model,
        plans: Sequence[TensorPlan],
        sources: Mapping[str, ParameterSource],
        dtype: torch.dtype | None,
        packing: Packing | None = None,
        calibrated: CalibratedWeights | None = None,
    ) -> None:
        self.graph = model.graph
        self.edit = Editor(model.graph)
        self.forms = StoredForms(model)
        self.calibrated = calibrated
        self.plans = {plan.name: plan for plan in plans if plan.is_stored}
        self.sources = sources
        self.dtype = dtype
        self.candidates = {} if packing is None else packing.candidates
        self.dequantized: dict[str, str] = {}

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

    def evaluate(self, value: ir.Value) -> Tensor | KeptWeight:
        """Compute a weight from the checkpoint, or read it as it is stored there."""
        candidate = self.candidates.get(str(value.name))
        if candidate is not None:
            loaded = candidate.load()
            if isinstance(loaded, KeptWeight):
                return loaded
            self.dequantized[candidate.name] = loaded
        expression = expression_of(value)
        changed = None if self.calibrated is None else self.calibrated.plain(str(value.name))
        if changed is not None:
            return changed.to(self.sources[expression.parameters[0]].dtype) if changed.dim() >= 2 else changed
        return expression.evaluate(lambda name: self.sources[name].load())

    def _pack(
        self, writer: BundleWriter, name: str, value: ir.Value, tensor: Tensor | KeptWeight, threads: int | None
    ) -> PackedWeight:
        if isinstance(tensor, KeptWeight):
            return self._keep(writer, name, value, tensor)
        writer.add_origin(name, origin_of(expression_of(value), lambda parameter: self.sources[parameter].shape))
        plan = self.plans.get(name)
        role = plan.role if plan is not None else "other"
        shape = tuple(tensor.shape)
        if not _is_finite(tensor):
            raise QuantizationError(f"{name}: the checkpoint holds values that are not finite (NaN or infinity)")
        if plan is None or plan.scheme is None:
            stored = self._store_plain(writer, name, value, tensor)
            return PackedWeight(name, shape, role, str(stored), 0.0, tensor.numel())
        result = None if self.calibrated is None else self.calibrated.quantized(name)
        if result is None:
            weight = numpy_of(tensor if tensor.dtype in _IR_TYPES else tensor.to(torch.float32))
            rounded = method_named("rtn").quantize(name, weight, plan.scheme, threads=threads)
            result = CalibratedWeight(rounded.tensor, rounded.relative_error, None)
            del weight
        del tensor
        weight_value = self._store_quantized(writer, name, value, result.tensor, plan.method)
        if plan.scheme.activation is not None:
            scale = None if result.input_range is None else result.input_range / plan.scheme.activation.largest
            self.forms.quantize_inputs(weight_value, plan.scheme.activation, scale)
        return PackedWeight(name, shape, role, str(plan.scheme), result.relative_error, int(np.prod(shape)))

    def _keep(self, writer: BundleWriter, name: str, value: ir.Value, kept: KeptWeight) -> PackedWeight:
        """Store a weight that the checkpoint has quantized."""
        candidate = self.candidates[name]
        if kept.input_order is None:
            origin = origin_of(expression_of(value), lambda parameter: self.sources[parameter].shape)
        else:
            origin = WeightOrigin((), ("Gather",))  # of columns, which rows of parameters do not describe
            reorder_inputs(self.edit, value, kept.input_order)
        writer.add_origin(name, origin)
        self._store_quantized(writer, name, value, kept.tensor, candidate.method)
        shape = kept.tensor.shape
        return PackedWeight(name, shape, candidate.role, candidate.format, 0.0, int(np.prod(shape)))

    def _store_quantized(
        self, writer: BundleWriter, name: str, value: ir.Value, tensor: QuantizedTensor, method: str
    ) -> ir.Value:
        """Store a quantized weight, and return the value that the graph now reads it through."""
        writer.add_quantized(name, tensor, method=method)
        del value.meta[WEIGHT]
        return self.forms.dequantize(value, tensor)

    def _store_plain(self, writer: BundleWriter, name: str, value: ir.Value, tensor: Tensor) -> torch.dtype:
        """Store vectors as float32 and matrices in the dtype asked for; integers as they are."""
        wanted = plain_dtype(tensor.dtype, tensor.dim(), self.dtype)
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
            self.forms.cast(value)
        return wanted


def plain_dtype(dtype: torch.dtype, rank: int, asked: torch.dtype | None) -> torch.dtype:
    """Return how a plain tensor is stored: vectors in float32, matrices as asked for, integers as they are."""
    if not dtype.is_floating_point:
        return dtype
    wanted = torch.float32 if rank < 2 else asked or dtype
    return wanted if wanted in _IR_TYPES else torch.float32


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
