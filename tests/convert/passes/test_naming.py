from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from inferencex.convert.passes.naming import name_values
from inferencex.formats.dialect import DOMAIN
from tests.convert.passes.graphs import TOKENS, Builder, assert_equal


def test_names_say_what_values_are() -> None:
    b = Builder()
    ids = b.input("token_ids", ["s0"], dtype=ir.DataType.INT64)
    rows = b.input("logit_rows", ["s1"], dtype=ir.DataType.INT64)
    x = b.node("Gather", b.parameter("model.embed.weight", 9, 4), ids, shape=["s0", 4])
    attributes = {"layer": 3, "num_heads": 2, "num_kv_heads": 2, "scale": 0.5}
    y = b.node("Attention", x, x, x, domain=DOMAIN, shape=["s0", 4], **attributes)
    table = b.constant(np.ones(4, np.float32), name="rope_table_5")
    y = b.node("Mul", b.node("Add", b.node("Add", y, b.constant(1.0)), b.constant(2.0)), table)
    model = b.model(b.node("Gather", y, rows, axis=0, shape=["s1", 4]))
    feeds = {"token_ids": np.arange(TOKENS), "logit_rows": np.array([2, 5])}
    expected = b.evaluate(model, feeds)
    name_values(model)
    names = [node.outputs[0].name for node in model.graph]
    assert names == ["gather.0", "layer3.attention.0", "add.0", "add.1", "mul.0", "logits"]
    assert set(model.graph.initializers) == {"model.embed.weight", "rope_table.0", "constant.0", "constant.1"}
    assert [str(v.shape) for v in (*model.graph.inputs, model.graph.outputs[0])] == ["[tokens]", "[rows]", "[rows,4]"]
    assert_equal(b.evaluate(model, feeds), expected)


def test_a_parameters_name_is_never_taken() -> None:
    b = Builder()
    b.input("token_ids", ["s0"], dtype=ir.DataType.INT64), b.input("logit_rows", ["s1"], dtype=ir.DataType.INT64)
    x = b.input("x", ["s0", 4])
    y = b.node("Add", b.node("Add", x, b.parameter("add.0", 4)), x)
    model = b.model(b.node("Exp", y))
    name_values(model)
    assert [node.outputs[0].name for node in model.graph] == ["add.1", "add.2", "logits"]
    names = [str(v.name) for node in model.graph for v in node.outputs] + list(model.graph.initializers)
    assert len(set(names)) == len(names)
    for value in model.graph.initializers.values():
        value.const_value = ir.tensor(b.parameters["add.0"].numpy(), name=value.name)
    onnx.checker.check_model(ir.serde.serialize_model(model), full_check=True)
