"""Which steps can be recorded: those in which the host waits for nothing that the device computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

pytest.importorskip("onnx_ir", reason="needs the extra inferencex[convert]")

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.graph import read_graph
from inferencex.runtime.backends.graph.static_values import StaticValues
from inferencex.runtime.backends.triton.lowering import Program, lower_graph
from inferencex.runtime.backends.triton.lowering.constants import Constants
from inferencex.runtime.backends.triton.step_inputs import StepInputs
from tests.runtime.backends.reference.steps import Model, initializer

WIDTH = 6
Numbers = Callable[[Model], ir.Value]


def fixed(m: Model) -> ir.Value:
    return initializer(m.graph, "fixed", np.array([2], np.int64))


def of_shapes(m: Model) -> ir.Value:
    """The number of tokens, which the host knows."""
    return m.node("Shape", m.ids, shape=[1], start=0, end=1)


def of_tokens(m: Model) -> ir.Value:
    """A number that only the device knows."""
    largest = m.node("ReduceMax", m.ids, initializer(m.graph, "axes", np.array([0], np.int64)), shape=[1])
    return m.node("Min", largest, initializer(m.graph, "most", np.array([WIDTH], np.int64)), shape=[1])


def lowered(numbers: Numbers, op_type: str) -> Program:
    m = Model()
    x, k = m.embed(WIDTH), numbers(m)
    if op_type == "TopK":
        y = m.node("TopK", x, k, shape=["tokens", "chosen"])
    elif op_type == "Tile":
        one = initializer(m.graph, "one", np.array([1], np.int64))
        y = m.node("Tile", x, m.node("Concat", one, k, shape=[2], axis=0), shape=["tokens", "wide"])
    elif op_type == "Pad":
        none = initializer(m.graph, "none", np.array([0, 0, 0], np.int64))
        y = m.node("Pad", x, m.node("Concat", none, k, shape=[4], axis=0), shape=["tokens", "wide"])
    else:
        ends = initializer(m.graph, "start", np.array([0], np.int64)), k
        y = m.node("Slice", x, *ends, initializer(m.graph, "axis", np.array([1], np.int64)), shape=["tokens", "some"])
    weight = m.node("ReduceSum", y, initializer(m.graph, "last", np.array([1], np.int64)), shape=["tokens", 1])
    return compiled(m, m.node("Mul", x, weight, shape=["tokens", WIDTH]))


def compiled(m: Model, y: ir.Value) -> Program:
    graph = read_graph(ir.to_proto(m.finish(y, WIDTH)))

    def nothing(name: str) -> Any:
        raise AssertionError(f"{name} is a constant inside the graph")

    constants = Constants(StaticValues(graph, nothing), torch.device("cpu"), torch.float32)
    return lower_graph(graph, constants, cast(Any, None), 64)


def result(program: Program) -> Tensor:
    ids = torch.tensor([3, 1, 2])
    values = {"token_ids": ids, "positions": torch.arange(3), "logit_rows": torch.arange(3)}
    return program.run(values, cast(StepInputs, None), program.logits)


@pytest.mark.parametrize("op_type", ["TopK", "Tile", "Slice"])
def test_numbers_that_the_device_computes_exclude_a_step(op_type: str) -> None:
    program = lowered(of_tokens, op_type)
    assert program.waiting == {op_type: 1}
    assert not program.stays_on_device
    # The largest token is 3, as is the number of tokens: the same, whoever knows it.
    torch.testing.assert_close(result(program), result(lowered(of_shapes, op_type)))


@pytest.mark.parametrize("op_type", ["TopK", "Tile", "Slice"])
@pytest.mark.parametrize("numbers", [fixed, of_shapes])
def test_numbers_that_the_host_knows_do_not(numbers: Numbers, op_type: str) -> None:
    program = lowered(numbers, op_type)
    assert not program.waiting
    assert program.stays_on_device


def test_what_runs_on_the_host_excludes_a_step() -> None:
    """torch has no operator for ONNX's Pad here."""
    program = lowered(of_tokens, "Pad")
    assert program.fallbacks == {"Pad": 1}
    assert not program.stays_on_device


def test_experts_that_a_step_computes_exclude_it() -> None:
    """No kernel knows them; torch's way to run them asks the device which experts there are."""
    m = Model()
    x = m.embed(WIDTH)
    stack = m.node("Mul", m.weight(3, WIDTH, WIDTH), m.node("ReduceMax", x, shape=[1, 1]), shape=[3, WIDTH, WIDTH])
    ids = m.node("Mod", m.ids, initializer(m.graph, "experts", np.array([3], np.int64)), shape=["tokens"])
    y = m.node("ExpertLinear", x, ids, stack, shape=["tokens", WIDTH], domain=DOMAIN)
    program = compiled(m, y)
    assert program.waiting == {"ExpertLinear": 1}
    assert not program.stays_on_device
