"""Weights that the checkpoint has quantized go into the bundle as they are, where the graph uses them as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from inferencex.convert.origins import origin_of
from inferencex.convert.passes.editing import Editor, is_weight
from inferencex.convert.passes.weights import expression_of
from inferencex.convert.quantize.plan import TensorPlan, WeightInfo
from inferencex.convert.quantize.scheme import PLAIN, QuantizationScheme
from inferencex.convert.source.base import Checkpoint
from inferencex.convert.source.packed.joining import concatenate_rows, rows_of
from inferencex.convert.source.parameter import PackedParameter, ParameterSource
from inferencex.formats.errors import OptionError
from inferencex.formats.packing import QuantizedTensor

_SHOWN = 4


@dataclass(frozen=True)
class KeptWeight:
    """A weight as it is stored in the bundle.

    input_order: int64 `[K]`, the input channel at each place of the tensor; None for 0, 1, 2, ...
    """

    tensor: QuantizedTensor
    input_order: NDArray[np.int64] | None


@dataclass(frozen=True)
class PackedRows:
    """Rows `start:stop` of a parameter."""

    parameter: PackedParameter
    start: int
    stop: int


@dataclass(frozen=True)
class Candidate:
    """A weight of the graph that is made of rows of packed parameters, one below the other."""

    name: str
    role: str
    parts: tuple[PackedRows, ...]

    @property
    def method(self) -> str:
        """The method that the checkpoint names."""
        return self.parts[0].parameter.method

    @property
    def format(self) -> str:
        """How the weight is stored, in words."""
        return " + ".join(dict.fromkeys(part.parameter.format for part in self.parts))

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take in the checkpoint, about what they will take in the bundle."""
        return sum(
            part.parameter.nbytes * (part.stop - part.start) // max(1, part.parameter.shape[0]) for part in self.parts
        )

    def load(self) -> KeptWeight | str:
        """Read the weight, or say why it cannot be kept as it is. Raises SourceError."""
        whole: dict[str, QuantizedTensor] = {}
        orders: list[NDArray[np.int64] | None] = []
        for part in self.parts:
            if part.parameter.name in whole:
                continue
            tensor = part.parameter.packed()
            if tensor is None:
                return "its parts are quantized in ways that one tensor cannot hold"
            whole[part.parameter.name] = tensor
            orders.append(part.parameter.input_order())
        order = orders[0]
        if any((o is None) != (order is None) or not np.array_equal(o, order) for o in orders[1:]):  # type: ignore[arg-type]
            return "its parts have their input channels in different orders"
        if order is not None and self.role not in ("linear", "router", "head"):
            return f"its input channels have an order of their own, which {self.role} weights cannot have"
        if len(self.parts) == 1 and self.parts[0].stop - self.parts[0].start == self.parts[0].parameter.shape[0]:
            return KeptWeight(whole[self.parts[0].parameter.name], order)
        joined = concatenate_rows([rows_of(whole[part.parameter.name], part.start, part.stop) for part in self.parts])
        if joined is None:
            return "its parts are quantized in ways that one tensor cannot hold"
        return KeptWeight(joined, order)


@dataclass(frozen=True)
class Packing:
    """What becomes of the packed parameters of a checkpoint.

    candidates:   weights to keep as they are, by name
    dequantized:  weights that read packed parameters and must be plain, with the reason
    """

    candidates: Mapping[str, Candidate]
    dequantized: Mapping[str, str]


def check_request(checkpoint: Checkpoint, scheme: QuantizationScheme, *, dequantize: bool) -> None:
    """Refuse to quantize what is quantized, unless asked to. Raises OptionError."""
    if checkpoint.packed is None:
        if dequantize:
            raise OptionError(
                f"--dequantize is for quantized checkpoints, and the weights of {checkpoint.name} are plain"
            )
        return
    if scheme.method != PLAIN and not dequantize:
        raise OptionError(
            f"--quantization {scheme.name}: the weights of {checkpoint.name} are quantized already "
            f"({checkpoint.packed}); leave the option out to keep them as they are, start from the original float "
            "checkpoint, or pass --dequantize to quantize a second time what was rounded once"
        )


def dequantized(sources: Mapping[str, ParameterSource]) -> dict[str, ParameterSource]:
    """Return the parameters, packed ones as the plain tensors they stand for."""
    return {name: s.dequantized() if isinstance(s, PackedParameter) else s for name, s in sources.items()}


def find_packed(model: ir.Model, weights: Sequence[WeightInfo], sources: Mapping[str, ParameterSource]) -> Packing:
    """Find, among the graph's weights, those that packed parameters can be kept for; nothing is read."""
    roles: dict[str, str] = {}
    for info in weights:
        roles.setdefault(info.tied_to or info.name, info.role)
    candidates: dict[str, Candidate] = {}
    reasons: dict[str, str] = {}
    for name, value in model.graph.initializers.items():
        if not is_weight(value):
            continue
        expression = expression_of(value)
        if not any(isinstance(sources[parameter], PackedParameter) for parameter in expression.parameters):
            continue
        if name not in roles:
            reasons[name] = "the graph uses it in another way than as the weight of a linear layer"
            continue
        origin = origin_of(expression, lambda parameter: sources[parameter].shape)
        parts = []
        for part in origin.parts:
            source = sources[part.parameter]
            if isinstance(source, PackedParameter) and not part.transposed and part.added == 0:
                parts.append(PackedRows(source, part.start, part.start + part.rows))
        if not origin.parts:
            reasons[name] = f"it is computed ({', '.join(origin.computed_by)})"
        elif len(parts) < len(origin.parts):
            reasons[name] = "some of its rows are stored plain, transposed or changed"
        elif len(parts) > 1 and roles[name] == "experts":
            reasons[name] = "its experts are stored in more than one tensor"
        else:
            candidates[name] = Candidate(name, roles[name], tuple(parts))
    return Packing(candidates, reasons)


def refuse_requantized(plans: Sequence[TensorPlan], packing: Packing) -> None:
    """Refuse options that give a weight another format than it has already. Raises OptionError."""
    for plan in plans:
        if plan.scheme is not None and plan.stored_as in packing.candidates:
            stored = packing.candidates[plan.stored_as].format
            raise OptionError(
                f"{plan.reason} asks for another format of {plan.stored_as}, which is quantized already ({stored}); "
                "leave the option out, or pass --dequantize"
            )


def say_dequantized(reasons: Mapping[str, str]) -> list[str]:
    """Say which packed weights become plain, one sentence for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return [
        f"{len(names)} quantized weights are stored plain, dequantized without loss, because of each: {reason} "
        f"({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})"
        for reason, names in by_reason.items()
    ]


def reorder_inputs(edit: Editor, weight: ir.Value, order: NDArray[np.int64]) -> None:
    """Let every linear that reads `weight [N, K]` see its input channels in the order that the weight has them in."""
    for use in list(weight.uses()):
        linear = use.node
        x = linear.inputs[0]
        assert x is not None
        indices = edit.constant(order, "input_order")
        shared = [u.node for u in x.uses() if u.node.op_type == "Gather" and u.node.inputs[1] is indices]
        if shared:
            linear.replace_input_with(0, shared[0].outputs[0])
            continue
        gather = edit.node("Gather", [x, indices], {"axis": 1}, shape=x.shape, stem="reordered")
        gather.name = gather.outputs[0].name
        producer = x.producer()
        if producer is None:
            edit.before(linear, gather)
        else:
            edit.after(producer, gather)
        linear.replace_input_with(0, gather.outputs[0])
