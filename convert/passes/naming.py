"""Name values after what they are, so that the graph can be read in Netron and in error messages."""

from __future__ import annotations

import re
from collections import Counter

import onnx_ir as ir

from inferencex.convert.passes.editing import is_weight
from inferencex.formats.dialect.schemas import DOMAIN

_KINDS = ("rope_table", "rope_frequencies")  # constants that say what they are
_SYMBOL = re.compile(r"[A-Za-z_]\w*")


def name_values(model: ir.Model) -> None:
    """Rename every computed value to `operator.number` and the output to `logits`; parameters keep their names."""
    graph = model.graph
    taken = set(graph.initializers) | {str(v.name) for v in graph.inputs}
    counters: Counter[str] = Counter()
    for node in graph:
        stem = node.op_type.lower()
        if node.domain == DOMAIN and node.op_type == "Attention":
            stem = f"layer{node.attributes['layer'].value}.attention"
        for value in node.outputs:
            while True:
                name = f"{stem}.{counters[stem]}"
                counters[stem] += 1
                if name not in taken:
                    break
            value.name = name
        node.name = str(node.outputs[0].name)
    _name_dimensions(model)
    (logits,) = graph.outputs
    logits.name = "logits"
    counters.clear()
    for name, value in list(graph.initializers.items()):
        if is_weight(value):
            continue
        del graph.initializers[name]
        kind = next((kind for kind in _KINDS if name.startswith(kind)), "constant")
        value.name = f"{kind}.{counters[kind]}"
        counters[kind] += 1
        if value.const_value is not None:
            value.const_value.name = value.name
        graph.initializers[value.name] = value


def _name_dimensions(model: ir.Model) -> None:
    """Call the symbolic dimensions `tokens` and `rows`, within expressions too; others lose their arbitrary names."""
    graph = model.graph
    inputs = {str(v.name): v for v in graph.inputs}
    names: dict[str, str] = {}
    for name, source in (("tokens", "token_ids"), ("rows", "logit_rows")):
        shape = inputs[source].shape
        assert shape is not None
        names[str(shape[0])] = name

    def renamed(dim: int | ir.SymbolicDim) -> int | str | None:
        if isinstance(dim, int):
            return dim
        symbols = _SYMBOL.findall(str(dim))
        known = bool(symbols) and all(symbol in names for symbol in symbols)
        return _SYMBOL.sub(lambda match: names[match[0]], str(dim)) if known else None

    for value in [*graph.inputs, *(v for node in graph for v in node.outputs)]:
        if value.shape is not None:
            value.shape = ir.Shape([renamed(dim) for dim in value.shape])
