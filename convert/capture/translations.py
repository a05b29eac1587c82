"""Translations to ONNX: of our own operators, and lean ones of the operators that decoders use most.

torch's own translations are general: a slice becomes fifteen nodes that the optimizer folds back into one. The ones
here cover the static case, which after `tidy` is nearly every case, and leave the rest to torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnxscript import opset23 as op
from onnxscript import values
from onnxscript.function_libs.torch_lib.ops.core import aten_index as _torchlib_index
from onnxscript.function_libs.torch_lib.ops.core import aten_slice_scatter as _torchlib_slice_scatter

from inferencex.formats.dialect import schemas

_LAST = 9223372036854775807


CAPTURE_DOMAIN = "inferencex.capture"


@functools.cache
def _capture_domain() -> Any:
    """Register the two operators that exist only between capture and the passes, whose mask is still an input."""
    single, optional = OpSchema.FormalParameterOption.Single, OpSchema.FormalParameterOption.Optional
    types = [("T", ["tensor(float)"], "activations")]

    def schema(name: str, inputs: str, attributes: dict[str, OpSchema.AttrType], positions: bool) -> OpSchema:
        kind = "tensor(int64)" if positions else "T"
        return OpSchema(
            name,
            CAPTURE_DOMAIN,
            1,
            inputs=[
                OpSchema.FormalParameter(n.rstrip("?"), kind, param_option=optional if n.endswith("?") else single)
                for n in inputs.split()
            ],
            outputs=[OpSchema.FormalParameter("y", "T" if not positions else "tensor(float)")],
            type_constraints=[] if positions else types,
            attributes=[OpSchema.Attribute(n, kind) for n, kind in attributes.items()],
        )

    integer, real = OpSchema.AttrType.INT, OpSchema.AttrType.FLOAT
    heads = {"num_heads": integer, "num_kv_heads": integer, "scale": real, "window": integer, "softcap": real}
    onnx.defs.register_schema(schema("Attention", "q k v mask? sinks?", heads, False))
    onnx.defs.register_schema(schema("CausalMask", "positions", {"window": integer, "chunk": integer}, True))
    return values.Opset(CAPTURE_DOMAIN, 1)


def _domain() -> Any:
    schemas.register()
    return values.Opset(schemas.DOMAIN, schemas.VERSION)


def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    sinks: Any,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    softcap: float,
) -> Any:
    """Translate the attention operator; the mask stays an input until `passes.masks` reads it."""
    return _capture_domain().Attention(
        q,
        k,
        v,
        mask,
        sinks,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        scale=scale,
        window=window,
        softcap=softcap,
    )


def causal_mask(positions: Any, window: int, chunk: int) -> Any:
    """Translate the opaque mask."""
    return _capture_domain().CausalMask(positions, window=window, chunk=chunk)


def expert_linear(x: Any, expert_ids: Any, weight: Any, bias: Any) -> Any:
    """Translate the linear layer with one weight per row."""
    return _domain().ExpertLinear(x, expert_ids, weight, bias)


def _ints(numbers: Sequence[int]) -> Any:
    return op.Constant(value_ints=list(numbers))


def view(x: Any, size: Sequence[Any]) -> Any:
    """Translate a reshape; `tidy` made its sizes integers unless two of them are symbolic."""
    if all(isinstance(dim, int) for dim in size):
        return op.Reshape(x, _ints(size))
    parts = [_ints([dim]) if isinstance(dim, int) else op.Reshape(dim, _ints([1])) for dim in size]
    return op.Reshape(x, op.Concat(*parts, axis=0))


def slice_tensor(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """Translate a slice of one axis."""
    first, last = 0 if start is None else start, _LAST if end is None else end
    if isinstance(first, int) and isinstance(last, int):
        if first == 0 and last == _LAST and step == 1:
            return op.Identity(x)
        return op.Slice(x, _ints([first]), _ints([last]), _ints([dim]), _ints([step]))
    starts, ends = (_ints([b]) if isinstance(b, int) else op.Reshape(b, _ints([1])) for b in (first, last))
    return op.Slice(x, starts, ends, _ints([dim]), _ints([step]))


def slice_scatter(x: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """Translate the assignment to a slice of one axis: what lies before it, the new values, what lies after."""
    size = x.shape[dim]
    if step != 1 or not isinstance(size, int) or not all(b is None or isinstance(b, int) for b in (start, end)):
        return _torchlib_slice_scatter(x, src, dim, start, end, step)
    first, last, _ = slice(start, end).indices(size)
    parts = [op.Slice(x, _ints([a]), _ints([b]), _ints([dim])) for a, b in ((0, first), (last, size)) if a < b]
    place = 1 if first > 0 else 0
    parts.insert(place, src)
    return op.Concat(*parts, axis=dim) if len(parts) > 1 else op.Identity(src)


def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Translate a concatenation."""
    return op.Concat(*tensors, axis=dim)


def unsqueeze(x: Any, dim: int) -> Any:
    """Translate the insertion of an axis."""
    return op.Unsqueeze(x, _ints([dim]))


def index_select(x: Any, dim: int, index: Any) -> Any:
    """Translate the selection of entries of one axis by a vector."""
    return op.Gather(x, index, axis=dim)


def index(x: Any, indices: Sequence[Any]) -> Any:
    """Translate advanced indexing; with one index tensor it is a Gather along that axis."""
    used = [(axis, entry) for axis, entry in enumerate(indices) if entry is not None]
    if len(used) == 1 and used[0][1].dtype == ir.DataType.INT64:
        return op.Gather(x, used[0][1], axis=used[0][0])
    return _torchlib_index(x, indices)


def table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the translations by torch operator, as `torch.onnx.export` takes them."""
    aten = torch.ops.aten
    own = torch.ops.inferencex
    return {
        own.attention.default: attention,
        own.causal_mask.default: causal_mask,
        own.expert_linear.default: expert_linear,
        aten.view.default: view,
        aten.reshape.default: view,
        aten.slice.Tensor: slice_tensor,
        aten.slice_scatter.default: slice_scatter,
        aten.cat.default: cat,
        aten.unsqueeze.default: unsqueeze,
        aten.index_select.default: index_select,
        aten.index.Tensor: index,
    }
