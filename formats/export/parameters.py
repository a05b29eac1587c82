"""The checkpoint's parameters, taken apart again from the weights that a bundle stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.bundle import Bundle
from inferencex.formats.bundle.origins import WeightPart
from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import ExportError
from inferencex.formats.graph import Node, Value
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor, pack_bits

Use = Literal["linear", "head", "embedding", "experts", "other"]

_READ_THROUGH = ("DequantizeLinear", "UnpackBits", "Cast", "Identity")
_MIXING = ("Gemm", "MatMul", "Attention", "Experts", "ExpertLinear")


@dataclass(frozen=True)
class _Piece:
    """Rows `start .. start + part.rows` of a stored tensor, which are the rows of a parameter that `part` says."""

    tensor: str
    start: int
    part: WeightPart


@dataclass(frozen=True)
class Parameter:
    """One parameter of the checkpoint, read from the bundle when asked for.

    name:       in the model's state
    shape:      as the checkpoint has it
    use:        what the graph does with it; a table that embeds tokens and is the head too is an `embedding`
    transposed: whether the bundle stores it the other way round, as `[out, in]`
    """

    name: str
    shape: tuple[int, ...]
    use: Use
    transposed: bool
    bundle: Bundle
    pieces: tuple[_Piece, ...]

    @property
    def module(self) -> str:
        """Name of the module that owns it."""
        return self.name.rpartition(".")[0]

    @property
    def is_quantized(self) -> bool:
        """Whether the bundle stores integers and scales."""
        return self.pieces[0].tensor in self.bundle.manifest.quantization

    @property
    def linear_shape(self) -> tuple[int, ...]:
        """The shape with output features first, as `effective` and `quantized` have it."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape

    def quantized(self) -> QuantizedTensor:
        """Return integers, scales and zero points of the parameter as `[..., out, in]`, whichever way it is stored.

        Raises ExportError when its rows are stored in different formats.
        """
        rows = [_quantized_rows(self.bundle.quantized(p.tensor), p.start, p.part.rows) for p in self.pieces]
        formats = {
            (r.number, r.bits, r.group_size, r.symmetric, r.scales.dtype.name, r.tensor_scale is None) for r in rows
        }
        if len(formats) > 1 or (len(rows) > 1 and rows[0].tensor_scale is not None):
            raise ExportError(f"{self.name}: parts of it are quantized in different ways, which no format can say")
        return rows[0] if len(rows) == 1 else _stacked(rows)

    def plain(self) -> NDArray[Any]:
        """Return the values in the checkpoint's layout; float32 where the bundle has them quantized."""
        arrays = []
        for piece in self.pieces:
            if self.is_quantized:
                values: NDArray[Any] = _quantized_rows(
                    self.bundle.quantized(piece.tensor), piece.start, piece.part.rows
                ).dequantize()
            else:
                values = self.bundle.tensor(piece.tensor)
                values = values[piece.start : piece.start + piece.part.rows] if values.ndim else values
            if piece.part.added:
                values = (values.astype(np.float32) - np.float32(piece.part.added)).astype(np.float32)
            arrays.append(values)
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return np.ascontiguousarray(whole.swapaxes(-1, -2)) if self.transposed else whole

    def effective(self) -> NDArray[Any]:
        """Return the values as the graph uses them: with what is added to them, and `[out, in]`."""
        if len(self.pieces) == 1 and not self.is_quantized:
            piece, values = self.pieces[0], self.bundle.tensor(self.pieces[0].tensor)
            return values[piece.start : piece.start + piece.part.rows] if values.ndim else values
        values = self.plain()
        values = np.ascontiguousarray(values.swapaxes(-1, -2)) if self.transposed else values
        added = self.pieces[0].part.added
        return (values.astype(np.float32) + np.float32(added)).astype(np.float32) if added else values


def parameters_of(bundle: Bundle) -> list[Parameter]:
    """Return the parameters that the graph reads, in the order of its weights.

    Raises ExportError for a bundle that does not record what its weights are made of, and for a weight that cannot be
    taken apart: one that is computed from parameters, or of which rows are missing.
    """
    origins = bundle.manifest.made_of
    if not origins:
        raise ExportError(
            f"{bundle.path}: does not record which of the checkpoint's parameters its weights are made of; "
            "convert it again with this version"
        )
    _check_recorded(bundle)
    pieces: dict[str, list[_Piece]] = {}
    for tensor, origin in origins.items():
        if tensor not in bundle.stored:
            raise ExportError(f"{bundle.path}: bundle.json describes a weight {tensor!r} that the graph does not have")
        if not origin.parts:
            raise ExportError(
                f"{tensor}: the bundle computes it from parameters by {', '.join(origin.computed_by)}, which cannot "
                "be undone exactly; export is for models whose weights are used as they are"
            )
        start = 0
        for part in origin.parts:
            pieces.setdefault(part.parameter, []).append(_Piece(tensor, start, part))
            start += part.rows
    return [_parameter(bundle, name, found) for name, found in pieces.items()]


def _check_recorded(bundle: Bundle) -> None:
    """Refuse a bundle with weights of which it does not record what they are made of; raises ExportError."""
    beside = {name for q in bundle.manifest.quantization.values() for name in (q.scales, q.zero_points, q.tensor_scale)}
    for name in bundle.stored:
        if name not in beside and name not in bundle.manifest.made_of and _use(bundle, name) != "other":
            raise ExportError(
                f"{name}: the bundle does not record which of the checkpoint's parameters this weight is made of; "
                "convert it again with this version"
            )


def _parameter(bundle: Bundle, name: str, found: Sequence[_Piece]) -> Parameter:
    chosen: list[_Piece] = []
    rows = 0
    for piece in sorted(found, key=lambda piece: piece.part.start):
        if piece.part.start < rows:  # stored twice, as when two layers read one parameter in different merged weights
            continue
        if piece.part.start > rows:
            break
        chosen.append(piece)
        rows += piece.part.rows
    last = max(piece.part.start + piece.part.rows for piece in found)
    same = {(p.part.transposed, p.part.added, p.tensor in bundle.manifest.quantization) for p in chosen}
    if rows != last or len(same) != 1:
        raise ExportError(
            f"{name}: only parts of it are in the bundle, or in different forms; it cannot be put together"
        )
    shape = _logical_shape(bundle, chosen[0].tensor)
    shape = (rows, *shape[1:]) if shape else ()
    transposed = chosen[0].part.transposed
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return Parameter(name, shape, _use(bundle, chosen[0].tensor), transposed, bundle, tuple(chosen))


def _logical_shape(bundle: Bundle, tensor: str) -> tuple[int, ...]:
    entry = bundle.manifest.quantization.get(tensor)
    return tuple(bundle.stored[tensor].shape) if entry is None else entry.shape


def _use(bundle: Bundle, tensor: str) -> Use:
    """Find from the graph what a stored tensor is for."""
    found: set[Use] = set()
    pending: list[Value] = [bundle.graph.initializers[tensor]]
    while pending:
        value = pending.pop()
        for node in value.consumers():
            if node.op_type in _READ_THROUGH and node.inputs[0] is value:
                pending.extend(node.outputs)
            elif node.op_type == "Gather" and node.inputs[0] is value:
                found.add("embedding")
            elif node.op_type in ("Experts", "ExpertLinear"):
                found.add("experts")
            elif node.op_type == "Gemm" and node.inputs[1] is value:
                found.add("head" if _makes_logits(node) else "linear")
    order: tuple[Use, ...] = ("embedding", "experts", "head", "linear")
    return next((use for use in order if use in found), "other")


def _makes_logits(node: Node) -> bool:
    """Tell whether what a linear makes reaches the end of the graph without being mixed again."""
    pending = [node.outputs[0]]
    while pending:
        value = pending.pop()
        if not value.consumers():
            continue
        for user in value.consumers():
            if user.op_type in _MIXING:
                return False
            pending.extend(user.outputs)
    return True


def _quantized_rows(tensor: QuantizedTensor, start: int, rows: int) -> QuantizedTensor:
    """Return rows of the first axis of a quantized weight."""
    if start == 0 and rows == tensor.shape[0]:
        return tensor
    chosen = slice(start, start + rows)
    points = tensor.zero_point_integers()
    return requantized(
        tensor, tensor.integers()[chosen], tensor.scales[chosen], None if points is None else points[chosen]
    )


def _stacked(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    points = [part.zero_point_integers() for part in parts]
    return requantized(
        parts[0],
        np.concatenate([part.integers() for part in parts]),
        np.concatenate([part.scales for part in parts]),
        None if points[0] is None else np.concatenate([p for p in points if p is not None]),
    )


def requantized(
    like: QuantizedTensor, integers: NDArray[Any], scales: NDArray[Any], zero_points: NDArray[Any] | None
) -> QuantizedTensor:
    """Return a tensor in the format of `like` with other values `[..., N, K]`, scales and zero points."""

    def stored(values: NDArray[Any]) -> NDArray[Any]:
        whole = np.ascontiguousarray(values)
        return pack_bits(whole, like.bits) if like.bits < 8 else whole

    return replace(
        like,
        values=stored(integers),
        scales=np.ascontiguousarray(scales),
        zero_points=None if zero_points is None else stored(zero_points),
        shape=tuple(integers.shape),
    )


def unsigned(tensor: QuantizedTensor) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return integers `[N, K]` and zero points `[N, groups]` from 0 to `2^bits - 1`, whatever the tensor stores.

    A symmetric tensor has the middle as its zero point. The tensor's numbers are integers.
    """
    middle = 1 << (tensor.bits - 1)
    integers, points = tensor.integers(), tensor.zero_point_integers()
    shift = 0 if integers.dtype == np.uint8 else middle
    shape = (*tensor.scale_shape, 1) if tensor.group_size == PER_CHANNEL else tensor.scale_shape
    moved = (integers.astype(np.int16) + shift).astype(np.uint8)
    if points is None:
        return moved, np.full(shape, middle, dtype=np.uint8)
    return moved, (points.astype(np.int16) + shift).astype(np.uint8).reshape(shape)


def grouped_scales(tensor: QuantizedTensor) -> NDArray[Any]:
    """Return the scales as `[N, groups]`, with one group where they are per channel."""
    return tensor.scales[:, None] if tensor.group_size == PER_CHANNEL else tensor.scales


def is_ragged(tensor: QuantizedTensor) -> bool:
    """Tell whether the last group of each row is shorter than the others."""
    return tensor.group_size != PER_CHANNEL and tensor.shape[-1] % tensor.group_size != 0


def stored_type(values: NDArray[Any]) -> DataType:
    """Return the element type of plain values."""
    name = values.dtype.name
    known = {"float32": DataType.FLOAT, "float16": DataType.FLOAT16, "bfloat16": DataType.BFLOAT16}
    known |= {"int64": DataType.INT64, "int32": DataType.INT32, "int8": DataType.INT8, "uint8": DataType.UINT8}
    known |= {"float8_e4m3fn": DataType.FLOAT8E4M3FN, "bool": DataType.BOOL}
    if name not in known:
        raise ExportError(f"values of type {name} have no form in the files that other tools read")
    return known[name]
