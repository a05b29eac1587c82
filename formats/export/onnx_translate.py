"""A bundle's graph, node by node, in operators that ONNX runtimes know: one sequence or batch in, logits out."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from inferencex.formats.bundle import Bundle
from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import ExportError
from inferencex.formats.export.onnx_graph import GraphBuilder
from inferencex.formats.export.onnx_weights import Weights, stored_behind
from inferencex.formats.graph import Node, Value

_TOKEN_INPUTS = ("token_ids", "positions", "logit_rows")
_LARGEST = {DataType.INT8: 127.0, DataType.FLOAT8E4M3FN: 448.0}
_VANISHING = 2.0**-100


class Translator:
    """Translates to standard operators, opset 23: `input_ids` int64 `[batch, sequence]` to `logits`, without any state.

    Within the graph everything is token by token, `[batch * sequence, features]`, as in the bundle.
    """

    def __init__(self, bundle: Bundle, builder: GraphBuilder) -> None:
        self.bundle = bundle
        self.builder = builder
        self.weights = Weights(bundle, builder)
        self.names: dict[str, str] = {}
        self.mask: dict[tuple[int, int], str] = {}

    def run(self) -> None:
        """Translate the whole graph; raises ExportError, naming the operator, for what has no form."""
        self.begin()
        for node in self.bundle.graph:
            self._node(node)
        self.end(self.bundle.graph.outputs[0])

    # --- inputs and outputs ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Declare the inputs, and make from them what the bundle's graph takes."""
        self._check_inputs()
        b = self.builder
        ids = b.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
        self.shape = b.node("Shape", [ids])
        length = b.node("Gather", [self.shape, b.constant(1)])
        self.range = b.node("Range", [b.constant(0), length, b.constant(1)])
        self.length_by_length = b.node(
            "Sub",
            [b.node("Unsqueeze", [self.range, b.constant([1])]), b.node("Unsqueeze", [self.range, b.constant([0])])],
        )
        positions = b.node("Expand", [self.range, self.shape])
        self.names["token_ids"] = b.node("Reshape", [ids, b.constant([-1])])
        self.names["positions"] = b.node("Reshape", [positions, b.constant([-1])])

    def end(self, logits: Value) -> None:
        """Declare the outputs."""
        b = self.builder
        width = logits.shape[-1] if logits.shape is not None else None
        if not isinstance(width, int):
            raise ExportError(f"{self.bundle.path}: the graph does not say how many logits it makes")
        self.by_sequence(self.value(logits), width, output="logits")
        b.output("logits", TensorProto.FLOAT, ["batch", "sequence", width])

    def _check_inputs(self) -> None:
        inputs = [value for value in self.bundle.graph.inputs if value.consumers()]
        others = [value.name for value in inputs if value.name not in _TOKEN_INPUTS]
        if others:
            raise ExportError(
                f"{self.bundle.path}: the graph also takes {', '.join(others)}, as its RoPE depends on the length of "
                "the prompt; onnx export has no form for that"
            )

    def by_sequence(self, tokens: str, width: int, output: str | None = None) -> str:
        """Return `[batch * sequence, width]` as `[batch, sequence, width]`."""
        b = self.builder
        shape = b.node("Concat", [self.shape, b.constant([width])], {"axis": 0})
        return b.node("Reshape", [tokens, shape], outputs=None if output is None else [output])

    def by_token(self, sequences: str, width: int, output: str) -> None:
        """Make `output` `[batch * sequence, width]` of `[batch, sequence, width]`."""
        b = self.builder
        b.node("Reshape", [sequences, b.constant([-1, width])], outputs=[output])

    # --- values ------------------------------------------------------------------------------------------------

    def value(self, value: Value | None) -> str:
        """Return the name that a value of the bundle's graph has here; weights come in as they are needed."""
        if value is None:
            return ""
        if value.name in self.names:
            return self.names[value.name]
        stored = stored_behind(value, self.bundle)
        if stored is not None:
            self.names[value.name] = self.weights.floats(stored)
        elif value.is_initializer:
            array = value.numpy()
            self.names[value.name] = self.builder.stored(
                value.name, array, int(DataType(value.dtype or DataType.UNDEFINED)), array.shape
            )
        else:
            self.names[value.name] = self.made(value)
        return self.names[value.name]

    def made(self, value: Value) -> str:
        """Return the name of what a node makes here; the bundle's logits are not the output yet."""
        return "logits.by_token" if value is self.bundle.graph.outputs[0] else value.name

    # --- nodes -------------------------------------------------------------------------------------------------

    def _node(self, node: Node) -> None:
        if all(stored_behind(output, self.bundle) is not None for output in node.outputs[:1]):
            return  # a weight on its way to being float32
        handler = getattr(self, f"_{node.op_type}", None)
        if node.domain and handler is None:
            raise ExportError(f"node {node.name}: {node.op_type} has no form in exported ONNX graphs")
        if handler is not None and handler(node):
            return
        inputs = [self.value(value) for value in node.inputs]
        self.builder.copy(node.proto, inputs, [self.made(value) for value in node.outputs])

    def _Gather(self, node: Node) -> bool:
        """Take rows: of all logits those of every token, of a quantized table its float32 rows."""
        table, rows = node.inputs[:2]
        assert table is not None and rows is not None
        if rows.name == "logit_rows":
            self.names[node.outputs[0].name] = self.value(table)
            return True
        return False

    def _DequantizeLinear(self, node: Node) -> bool:
        """Read rows of a quantized table, which the bundle gathers before it makes numbers of them."""
        gather = None if node.inputs[0] is None else node.inputs[0].producer()
        if gather is None or gather.op_type != "Gather" or gather.inputs[0] is None:
            return False
        stored = gather.inputs[0].name
        if not self.weights.is_quantized(stored):
            return False
        rows = [self.weights.floats(stored), self.value(gather.inputs[1])]
        self.builder.node("Gather", rows, {"axis": 0}, outputs=[self.made(node.outputs[0])])
        return True

    def _Gemm(self, node: Node) -> bool:
        return False

    def _GatedActivation(self, node: Node) -> bool:
        b, x, attributes = self.builder, self.value(node.inputs[0]), node.attributes
        if attributes.get_string("layout", "concat") == "concat":
            gate, up = b.fresh("gate"), b.fresh("up")
            b.node("Split", [x], {"axis": -1, "num_outputs": 2}, outputs=[gate, up])
        else:
            ends = [b.constant([np.iinfo(np.int64).max]), b.constant([-1]), b.constant([2])]
            gate, up = (b.node("Slice", [x, b.constant([start]), *ends]) for start in (0, 1))
        kind = attributes.get_string("activation")
        if kind == "swiglu_clamped":
            limit = attributes.get_float("limit", 0.0)
            high, low = (b.constant(sign * limit, np.float32) for sign in (1, -1))
            gate = b.node("Clip", [gate, "", high]) if limit else gate
            up = b.node("Clip", [up, low, high]) if limit else up
            up = b.node("Add", [up, b.constant(1.0, np.float32)])
            slope = b.constant(attributes.get_float("alpha", 1.0), np.float32)
            activated = b.node("Mul", [gate, b.node("Sigmoid", [b.node("Mul", [gate, slope])])])
        else:
            activated = self._activated(kind, gate)
        b.node("Mul", [activated, up], outputs=[self.made(node.outputs[0])])
        return True

    def _activated(self, kind: str, x: str) -> str:
        b = self.builder
        match kind:
            case "silu":
                return b.node("Mul", [x, b.node("Sigmoid", [x])])
            case "gelu":
                return b.node("Gelu", [x])
            case "gelu_tanh":
                return b.node("Gelu", [x], {"approximate": "tanh"})
            case "relu":
                return b.node("Relu", [x])
            case "relu2":
                rectified = b.node("Relu", [x])
                return b.node("Mul", [rectified, rectified])
            case "sigmoid":
                return b.node("Sigmoid", [x])
        raise ExportError(f"the activation {kind} has no form in exported ONNX graphs")

    def _AddRMSNormalization(self, node: Node) -> bool:
        x, residual, scale = (self.value(value) for value in node.inputs)
        total = self.builder.node(
            "Add", [x, residual], outputs=[self.made(node.outputs[1]) or self.builder.fresh("sum")]
        )
        attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
        self.builder.node("RMSNormalization", [total, scale], attributes, outputs=[self.made(node.outputs[0])])
        return True

    def _AddLayerNormalization(self, node: Node) -> bool:
        x, residual, *affine = (self.value(value) for value in node.inputs)
        total = self.builder.node(
            "Add", [x, residual], outputs=[self.made(node.outputs[1]) or self.builder.fresh("sum")]
        )
        attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
        self.builder.node("LayerNormalization", [total, *affine], attributes, outputs=[self.made(node.outputs[0])])
        return True

    def _QuantizeRows(self, node: Node) -> bool:
        b, x, to = self.builder, self.value(node.inputs[0]), DataType(node.attributes.get_int("to"))
        largest = b.constant(_LARGEST[to], np.float32)
        zero = b.constant(0.0, np.float32)
        magnitudes = b.node("ReduceMax", [b.node("Abs", [x]), b.constant([1])], {"keepdims": 1})
        seen = b.node("GreaterOrEqual", [magnitudes, b.constant(_VANISHING, np.float32)])
        factors = b.node("Where", [seen, b.node("Div", [largest, magnitudes]), zero])
        scales = b.node("Where", [seen, b.node("Div", [magnitudes, largest]), zero])
        scaled = b.node("Mul", [x, factors])
        rounded = b.node("Round", [scaled]) if to is DataType.INT8 else scaled
        b.node("Cast", [rounded], {"to": int(to)}, outputs=[self.made(node.outputs[0])])
        b.node("Squeeze", [scales, b.constant([1])], outputs=[self.made(node.outputs[1])])
        return True

    def _Attention(self, node: Node) -> bool:
        b, attributes = self.builder, node.attributes
        if len(node.inputs) > 3 and node.inputs[3] is not None:
            raise ExportError(f"node {node.name}: attention with sinks has no form in exported ONNX graphs")
        q, k, v = (self.by_sequence(self.value(value), self.width(value)) for value in node.inputs[:3])
        heads, kv_heads = attributes.get_int("num_heads"), attributes.get_int("num_kv_heads")
        slopes = node.inputs[4] if len(node.inputs) > 4 else None
        mask = self._mask(attributes.get_int("window", 0), attributes.get_int("chunk", 0))
        if slopes is not None:
            by_head = b.node("Reshape", [self.value(slopes), b.constant([-1, 1, 1])])
            distance = b.node("Neg", [b.node("Cast", [self.length_by_length], {"to": TensorProto.FLOAT})])
            bias = b.node("Mul", [by_head, distance])
            mask = bias if not mask else b.node("Where", [mask, bias, b.constant(-np.inf, np.float32)])
            mask = b.node("Unsqueeze", [mask, b.constant([0])])
        made = b.node(
            "Attention",
            [q, k, v, *([mask] if mask else [])],
            {
                "is_causal": 1,
                "q_num_heads": heads,
                "kv_num_heads": kv_heads,
                "scale": attributes.get_float("scale"),
                "softcap": attributes.get_float("softcap", 0.0),
            },
        )
        width = self.width(node.inputs[2]) // kv_heads * heads
        self.by_token(made, width, self.made(node.outputs[0]))
        return True

    def _mask(self, window: int, chunk: int) -> str:
        """Return which keys a query may see within its window or chunk, bool `[sequence, sequence]`; "" for all."""
        if not window and not chunk:
            return ""
        if (window, chunk) not in self.mask:
            b = self.builder
            seen = []
            if window:
                seen.append(b.node("Less", [self.length_by_length, b.constant(window)]))
            if chunk:
                numbers = b.node("Div", [self.range, b.constant(chunk)])
                rows, columns = (b.node("Unsqueeze", [numbers, b.constant([axis])]) for axis in (1, 0))
                seen.append(b.node("Equal", [rows, columns]))
            self.mask[window, chunk] = seen[0] if len(seen) == 1 else b.node("And", seen)
        return self.mask[window, chunk]

    def width(self, value: Value | None) -> int:
        """Return the number of features of a value."""
        size = value.shape[-1] if value is not None and value.shape is not None else None
        if not isinstance(size, int):
            raise ExportError(f"{self.bundle.path}: the graph does not say how wide {value} is")
        return size
