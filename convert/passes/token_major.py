"""Drop the batch dimension: `[1, tokens, ...]` becomes `[tokens, ...]` everywhere.

transformers computes on batches; a step of the runtime is one ragged row of tokens. The pass walks the graph once and
keeps, for every value, whether it is represented without its leading 1. An operator it does not know is left as it is
between an Unsqueeze and a Squeeze.

On the way it refuses graphs in which anything but attention combines different tokens, since those cannot run on
ragged batches: the symbolic token dimension must stay an axis along which nothing is sliced, reduced or shifted.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import onnx_ir as ir

from inferencex.convert.passes.editing import Editor, attribute, constant_of, dims, drop_dead, ints_of, is_weight, rank
from inferencex.convert.passes.elementwise import ELEMENTWISE
from inferencex.formats.errors import CaptureError

_AXIS_ATTRIBUTE = {
    "ArgMax", "ArgMin", "Concat", "GatherElements", "LayerNormalization", "LogSoftmax", "RMSNormalization",
    "ScatterElements", "Softmax", "Split", "TopK",
}  # fmt: skip
_AXES_INPUT = {
    "CumSum": 1, "ReduceL1": 1, "ReduceL2": 1, "ReduceMax": 1, "ReduceMean": 1, "ReduceMin": 1, "ReduceProd": 1,
    "ReduceSum": 1, "ReduceSumSquare": 1, "ReduceLogSumExp": 1, "Slice": 3,
}  # fmt: skip
_COMBINES = {
    "Attention", "AveragePool", "Compress", "Conv", "ConvInteger", "ConvTranspose", "DFT", "DeformConv", "DepthToSpace",
    "Det", "Einsum", "GRU", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "GridSample", "GroupNormalization",
    "If", "InstanceNormalization", "LRN", "LSTM", "Loop", "LpPool", "MatMulInteger", "MaxPool", "NonZero", "Pad",
    "MeanVarianceNormalization", "QLinearConv", "QLinearMatMul", "RNN", "Resize", "ReverseSequence", "STFT", "Scan",
    "SpaceToDepth", "Unique",
}  # fmt: skip
_RESHAPES = {"Reshape", "Unsqueeze", "Squeeze", "Flatten"}
_DEFAULT_AXIS = {"ArgMax": 0, "ArgMin": 0, "Split": 0, "GatherElements": 0, "ScatterElements": 0}


class _TokenMajor:
    def __init__(self, model: ir.Model, tokens: str) -> None:
        self.graph = model.graph
        self.edit = Editor(model.graph)
        self.tokens = tokens
        self.dropped: set[ir.Value] = set()

    def run(self) -> None:
        for value in self.graph.inputs:
            if rank(value) == 2:
                self._drop(value)
        for node in list(self.graph):
            self._visit(node)
            self._squeeze_outputs(node)
        for value in self.graph.outputs:
            if value not in self.dropped:
                raise CaptureError(
                    f"output {value.name} has shape {value.shape}: its batch dimension could not be removed"
                )
        drop_dead(self.graph)

    # --- what is known about values ------------------------------------------------------------------------

    def _drop(self, value: ir.Value) -> None:
        assert value.shape is not None
        value.shape = ir.Shape(list(value.shape)[1:])
        self.dropped.add(value)

    def _full_rank(self, value: ir.Value) -> int:
        return rank(value) + (value in self.dropped)

    def _full_dims(self, value: ir.Value) -> list[int | ir.SymbolicDim]:
        assert value.shape is not None
        return ([1] if value in self.dropped else []) + list(value.shape)

    def _batched(self, value: ir.Value) -> bool:
        """Whether an output still has a leading 1 in front of a token dimension."""
        shape = [] if value.shape is None else list(value.shape)
        return len(shape) >= 2 and shape[0] == 1 and any(not isinstance(d, int) for d in shape)

    def _token_axes(self, value: ir.Value) -> set[int]:
        """The axes of the tokens, counted from the end; none where they are merged with other axes."""
        dims, full = self._full_dims(value), self._full_rank(value)
        return {axis - full for axis, dim in enumerate(dims) if not isinstance(dim, int) and str(dim) == self.tokens}

    def _without_leading(self, node: ir.Node, value: ir.Value) -> ir.Value:
        """Return `value`, whose first dimension is 1, without it."""
        array = constant_of(value)
        if array is not None:
            return self.edit.constant(array[0])
        assert value.shape is not None
        squeezed = self.edit.node(
            "Squeeze",
            [value, self.edit.constant([0])],
            shape=list(value.shape)[1:],
            dtype=value.dtype,
            stem=str(value.name),
        )
        return self.edit.before(node, squeezed)

    def _squeeze_outputs(self, node: ir.Node) -> None:
        """Take the batch dimension from outputs that still have it: of a stack of batches one was picked, say."""
        if node.graph is None:
            return
        for output in node.outputs:
            if (
                output in self.dropped
                or (not output.uses() and not output.is_graph_output())
                or not self._batched(output)
            ):
                continue
            assert output.shape is not None
            squeeze = self.edit.node(
                "Squeeze",
                [output, self.edit.constant([0])],
                shape=list(output.shape)[1:],
                dtype=output.dtype,
                stem=str(output.name),
            )
            new = self.edit.after(node, squeeze)
            output.replace_all_uses_with(new, replace_graph_outputs=True)
            squeeze.replace_input_with(0, output)
            self.dropped.add(new)

    # --- one node -------------------------------------------------------------------------------------------

    def _visit(self, node: ir.Node) -> None:
        inputs = [v for v in node.inputs if v is not None]
        touched = any(v in self.dropped for v in inputs)
        if node.op_type in _RESHAPES and node.domain == "":
            if touched or (self._batched(node.outputs[0]) and not all(is_weight(v) for v in inputs[:1])):
                self._reshape(node)
            return
        if not touched:
            return
        if node.domain != "":
            self._custom(node)
        elif node.op_type in ELEMENTWISE:
            self._elementwise(node)
        elif node.op_type in _AXIS_ATTRIBUTE or node.op_type in _AXES_INPUT:
            self._along_axis(node)
        elif node.op_type == "Transpose":
            self._transpose(node)
        elif node.op_type == "MatMul":
            self._matmul(node)
        elif node.op_type == "Gather":
            self._gather(node)
        elif node.op_type == "Expand":
            self._expand(node)
        elif node.op_type in _COMBINES and any(self._token_axes(v) for v in inputs):
            self._refuse(node)
        else:
            self._wrap(node)

    def _custom(self, node: ir.Node) -> None:
        if any(v is not None and v in self.dropped for v in node.inputs):
            for output in node.outputs:
                if self._batched(output):
                    self._drop(output)

    def _elementwise(self, node: ir.Node) -> None:
        output = node.outputs[0]
        full = len(self._shape_of(output))
        at_full_rank = [v for v in node.inputs if v is not None and self._full_rank(v) == full]
        if not full or self._shape_of(output)[0] != 1 or not any(v in self.dropped for v in at_full_rank):
            return
        for index, value in enumerate(node.inputs):
            if value is not None and value not in self.dropped and self._full_rank(value) == full:
                node.replace_input_with(index, self._without_leading(node, value))
        self._drop(output)

    @staticmethod
    def _shape_of(value: ir.Value) -> list[int | ir.SymbolicDim]:
        if value.shape is None:
            raise CaptureError(f"the shape of {value.name}, computed by {value.producer()}, is unknown")
        return list(value.shape)

    def _along_axis(self, node: ir.Node) -> None:
        data = node.inputs[0]
        assert data is not None
        full = self._full_rank(data)
        if node.op_type in _AXES_INPUT:
            index = _AXES_INPUT[node.op_type]
            given = ints_of(node.inputs[index]) if len(node.inputs) > index else None
            every = range(-full, 0)  # without axes it is all of them
            axes = list(every) if given is None else [a if a < 0 else a - full for a in given]
        else:
            default = _DEFAULT_AXIS.get(node.op_type, -1)
            axis = int(attribute(node, "axis", default))
            axes = [axis if axis < 0 else axis - full]
        self._refuse_mixing(node, data, axes)
        if -full in axes or any(self._full_rank(v) != full for v in self._operands(node)):
            self._wrap(node)
            return
        if node.op_type in _AXES_INPUT:
            node.replace_input_with(_AXES_INPUT[node.op_type], self._axes_constant(node, axes))
        else:
            node.attributes["axis"] = ir.AttrInt64("axis", axes[0])
        for position, value in enumerate(node.inputs):
            if value in self._operands(node) and value not in self.dropped:
                assert value is not None
                node.replace_input_with(position, self._without_leading(node, value))
        for output in node.outputs:
            if output.shape is not None:
                self._drop(output)

    def _axes_constant(self, node: ir.Node, axes: list[int]) -> ir.Value:
        """Return the axes as the operator takes them: a list, for CumSum a scalar."""
        return self.edit.constant(np.asarray(axes[0] if node.op_type == "CumSum" else axes, dtype=np.int64))

    def _operands(self, node: ir.Node) -> list[ir.Value]:
        """The inputs that share the data's axes."""
        if node.op_type in ("Concat", "GatherElements", "ScatterElements"):
            return [v for v in node.inputs if v is not None]
        return [v for v in node.inputs[:1] if v is not None]

    def _refuse_mixing(self, node: ir.Node, data: ir.Value, axes: list[int]) -> None:
        same_size = self._full_dims(node.outputs[0]) == self._full_dims(data)
        if self._token_axes(data) & set(axes) and not (node.op_type == "Slice" and same_size):
            self._refuse(node)

    @staticmethod
    def _refuse(node: ir.Node) -> NoReturn:
        raise CaptureError(
            f"{node.op_type} ({node.outputs[0].name}) works along the tokens of a sequence: layers other than "
            "attention that combine tokens (recurrent state, convolutions) are not supported"
        )

    def _transpose(self, node: ir.Node) -> None:
        (data,) = node.inputs
        assert data is not None
        if data not in self.dropped:
            return
        perm = list(attribute(node, "perm"))
        if perm[0] != 0:
            self._wrap(node)
            return
        node.attributes["perm"] = ir.AttrInt64s("perm", [p - 1 for p in perm[1:]])
        self._drop(node.outputs[0])

    def _matmul(self, node: ir.Node) -> None:
        a, b = node.inputs
        assert a is not None and b is not None
        output = node.outputs[0]
        if a in self.dropped and self._full_rank(b) == 2 and self._full_rank(a) >= 3 and b not in self.dropped:
            self._drop(output)
            return
        if -1 in self._token_axes(a) or -2 in self._token_axes(b):
            raise CaptureError(
                f"MatMul ({output.name}) adds up over the tokens of a sequence: attention computed in a way that was "
                "not recognized, or a layer with recurrent state"
            )
        if self._full_rank(a) == self._full_rank(b) >= 3 and self._shape_of(output)[0] == 1:
            for index, value in enumerate((a, b)):
                if value not in self.dropped:
                    node.replace_input_with(index, self._without_leading(node, value))
            self._drop(output)
            return
        self._wrap(node)

    def _gather(self, node: ir.Node) -> None:
        data, indices = node.inputs
        assert data is not None and indices is not None
        axis = int(attribute(node, "axis", 0))
        full = self._full_rank(data)
        axis = axis if axis < 0 else axis - full
        output = node.outputs[0]
        if data in self.dropped and indices not in self.dropped:
            if axis == -full and constant_of(indices) is not None and rank(indices) == 0:
                output.replace_all_uses_with(data, replace_graph_outputs=True)
                return
            if axis == -full:
                self._wrap(node)
                return
            if axis in self._token_axes(data) and str(self.graph.inputs[2].name) != str(indices.name):
                raise CaptureError(f"Gather ({output.name}) picks tokens by their index in the batch")
            node.attributes["axis"] = ir.AttrInt64("axis", axis)
            if axis == -full + 1 and rank(indices) == 1:
                node.attributes["axis"] = ir.AttrInt64("axis", 0)
            self._drop(output)
        elif indices in self.dropped and data not in self.dropped and axis == -full:
            self._drop(output)
        else:
            self._wrap(node)

    def _expand(self, node: ir.Node) -> None:
        data, output = node.inputs[0], node.outputs[0]
        assert data is not None
        before, after = self._full_dims(data), self._shape_of(output)
        before = [*[1] * (len(after) - len(before)), *before]
        target = [1 if str(b) == str(a) else a for b, a in zip(before, after, strict=True)]
        sizes = [d for d in target if isinstance(d, int)]
        if data not in self.dropped or len(sizes) < len(target) or after[0] != 1:
            self._wrap(node)
            return
        if all(d == 1 for d in sizes) and self._full_rank(data) == len(after):
            output.replace_all_uses_with(data, replace_graph_outputs=True)
            return
        node.replace_input_with(1, self.edit.constant(sizes[1:]))
        self._drop(output)

    def _reshape(self, node: ir.Node) -> None:
        data, output = node.inputs[0], node.outputs[0]
        assert data is not None
        target = dims(output)
        drops = self._batched(output) or (data in self.dropped and target[0] == 1 and len(target) > 1)
        wanted = target[1:] if drops else target
        if wanted.count(-1) > 1:
            self._wrap(node)
            return
        if drops:
            self._drop(output)
        if wanted == dims(data):
            if not drops or output in self.dropped:
                self._forward(output, data)
            return
        reshape = self.edit.node(
            "Reshape",
            [data, self.edit.constant(wanted)],
            shape=list(output.shape or []),
            dtype=output.dtype,
            stem="reshape",
        )
        new = self.edit.before(node, reshape)
        if output in self.dropped:
            self.dropped.add(new)
        output.replace_all_uses_with(new, replace_graph_outputs=True)

    def _forward(self, output: ir.Value, data: ir.Value) -> None:
        """Let readers of a reshape that became a no-op read its input, in the right state."""
        if (output in self.dropped) == (data in self.dropped):
            output.replace_all_uses_with(data, replace_graph_outputs=True)
            return
        same = self.edit.node("Identity", [data], shape=list(output.shape or []), dtype=output.dtype, stem="reshape")
        producer = output.producer()
        assert producer is not None
        new = self.edit.before(producer, same)
        if output in self.dropped:
            self.dropped.add(new)
        output.replace_all_uses_with(new, replace_graph_outputs=True)

    def _wrap(self, node: ir.Node) -> None:
        """Give a node its batch dimension back, and take it away from what it computes."""
        for index, value in enumerate(node.inputs):
            if value is not None and value in self.dropped:
                assert value.shape is not None
                unsqueeze = self.edit.node(
                    "Unsqueeze",
                    [value, self.edit.constant([0])],
                    shape=[1, *value.shape],
                    dtype=value.dtype,
                    stem=str(value.name),
                )
                node.replace_input_with(index, self.edit.before(node, unsqueeze))


def to_token_major(model: ir.Model) -> None:
    """Rewrite `model` in place. Raises CaptureError when something but attention combines tokens."""
    tokens = next(v for v in model.graph.inputs if v.name == "token_ids")
    assert tokens.shape is not None
    _TokenMajor(model, str(tokens.shape[1])).run()
