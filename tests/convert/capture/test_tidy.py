"""Programs are cleaned without changing what they compute, and positions become explicit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from inferencex.convert.capture.tidy import is_mutation, static_shape, tidy
from inferencex.formats.errors import CaptureError

Function = Callable[[Tensor, Tensor], Tensor]


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.function(x, positions)


def _export(function: Function) -> torch.export.ExportedProgram:
    tokens = torch.export.Dim("tokens", min=3, max=1024)
    inputs = torch.randn(1, 7, 6), torch.arange(7)[None]
    shapes = ({1: tokens}, {1: tokens})
    program = torch.export.export(
        _Module(function),
        inputs,
        dynamic_shapes=shapes,
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    tidy(program, positions="positions")
    return program


def _targets(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def _run(program: torch.export.ExportedProgram, x: Tensor, positions: Tensor) -> Tensor:
    result: Tensor = program.graph_module(x, positions)[0]
    return result


RANGES: dict[str, Function] = {
    "arange": lambda x, p: x + torch.arange(x.shape[1])[None, :, None],
    "arange from 0": lambda x, p: x + torch.arange(0, x.shape[1])[None, :, None],
    "float arange": lambda x, p: x + torch.arange(x.shape[1], dtype=torch.float32)[None, :, None],
    "count of ones": lambda x, p: x + (torch.cumsum(torch.ones(1, x.shape[1], dtype=torch.int64), -1) - 1)[..., None],
    "count of a mask": lambda x, p: x + (torch.ones(1, x.shape[1]).long().cumsum(1) - 1)[..., None],
    "count of filled": lambda x, p: x + (torch.full((1, x.shape[1]), 1).cumsum(-1) - 1)[..., None],
}


@pytest.mark.parametrize("name", RANGES)
def test_a_ramp_over_the_tokens_follows_the_positions(name: str) -> None:
    function = RANGES[name]
    program = _export(function)
    assert not [t for t in _targets(program) if "arange" in t or "cumsum" in t]
    x, whole = torch.randn(1, 9, 6), torch.arange(9)[None]
    torch.testing.assert_close(_run(program, x, whole), function(x, whole))
    moved = torch.tensor([[0, 1, 2, 0, 1, 0, 4, 5, 6]])  # a ragged batch of several sequences
    torch.testing.assert_close(_run(program, x, moved), x + moved[..., None])


def test_ranges_and_counts_of_other_things_stay() -> None:
    def function(x: Tensor, positions: Tensor) -> Tensor:
        ramp = torch.arange(6) + torch.cumsum(torch.ones(6, dtype=torch.int64), 0)
        return x + ramp + torch.cumsum(x, 2)

    program = _export(function)
    assert sum("cumsum" in t for t in _targets(program)) == 2
    x = torch.randn(1, 9, 6)
    torch.testing.assert_close(_run(program, x, torch.zeros(1, 9, dtype=torch.int64)), function(x, x))


def test_a_count_of_what_the_tokens_say_is_no_position() -> None:
    def function(x: Tensor, positions: Tensor) -> Tensor:
        return x + torch.cumsum((x.mean(-1) > 0).to(torch.int64), 1)[..., None]

    program = _export(function)
    x = torch.randn(1, 9, 6)
    torch.testing.assert_close(_run(program, x, torch.arange(9)[None]), function(x, x))


def test_a_range_that_starts_later_is_no_position() -> None:
    def function(x: Tensor, positions: Tensor) -> Tensor:
        return x + torch.arange(1, x.shape[1] + 1)[None, :, None]

    program = _export(function)
    assert any("arange" in t for t in _targets(program))
    x, positions = torch.randn(1, 9, 6), torch.arange(9)[None]
    torch.testing.assert_close(_run(program, x, positions), function(x, positions))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, p: x[:, 1:] + torch.arange(1, x.shape[1])[None, :, None], "starts at 1 with step 1"),
        (lambda x, p: x.sum() + torch.arange(0, x.shape[1], 2), "starts at 0 with step 2"),
    ],
)
def test_a_part_of_the_range_of_tokens_is_refused(function: Function, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        _export(function)


def test_copies_and_casts_to_the_same_dtype_go() -> None:
    program = _export(lambda x, p: (x.float().contiguous().clone().to(torch.float32).detach() * 2).to("cpu").exp())
    assert _targets(program) == ["aten.mul.Tensor", "aten.exp.default"]


def test_casts_that_round_stay() -> None:
    def function(x: Tensor, positions: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float().exp()

    program = _export(function)
    assert len(_targets(program)) == 3
    x = torch.randn(1, 9, 6)
    torch.testing.assert_close(_run(program, x, torch.arange(9)[None]), function(x, x))


def test_shapes_of_views_are_integers() -> None:
    def function(x: Tensor, positions: Tensor) -> Tensor:
        split = x.view(x.shape[0], x.shape[1], 2, 3).transpose(1, 2).contiguous()
        return split.view(x.shape[0], -1, 3).reshape(1, 2, x.shape[1], 3).exp()

    program = _export(function)
    shapes = [node.args[1] for node in program.graph.nodes if "reshape" in str(node.target)]
    assert shapes and all(isinstance(size, int) for shape in shapes for size in shape)
    x = torch.randn(1, 9, 6)
    torch.testing.assert_close(_run(program, x, torch.arange(9)[None]), function(x, x))


def test_an_output_that_is_a_copy_survives() -> None:
    program = _export(lambda x, p: (x * 2).clone())
    (result,) = next(iter(reversed(program.graph.nodes))).args[0]
    assert tuple(program.graph_signature.user_outputs) == (result.name,)
    x = torch.randn(1, 9, 6)
    torch.testing.assert_close(_run(program, x, torch.arange(9)[None]), x * 2)


def test_static_shapes() -> None:
    tokens = torch.export.Dim("tokens")
    assert static_shape([1, 4]) == [1, 4]
    assert static_shape([1, tokens, 4]) == [1, -1, 4]
    assert static_shape([tokens, tokens]) is None


def test_mutations_are_told_from_functions() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert is_mutation(graph.call_function(torch.ops.aten.add_.Tensor, (x, x)))
    assert not is_mutation(graph.call_function(torch.ops.aten.add.Tensor, (x, x)))
