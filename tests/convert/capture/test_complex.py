"""Complex arithmetic becomes arithmetic on pairs of reals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from inferencex.convert.capture.complex import make_real
from inferencex.formats.errors import CaptureError

Function = Callable[[Tensor, Tensor], Tensor]


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


def _turn(angles: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angles) * 1.5, angles)


def _rotation(x: Tensor, angles: Tensor) -> Tensor:
    return torch.view_as_real(_complex(x) * _turn(angles)).flatten(2)


def _scaled(x: Tensor, angles: Tensor) -> Tensor:
    return torch.view_as_real(_complex(x) * 0.5 * angles).flatten(2)


def _factor_first(x: Tensor, angles: Tensor) -> Tensor:
    return torch.view_as_real(angles * _complex(x)).flatten(2)


def _square(x: Tensor, angles: Tensor) -> Tensor:
    value = _complex(x)
    return torch.view_as_real(value * value).flatten(2)


def _unsqueezed(x: Tensor, angles: Tensor) -> Tensor:
    value = _complex(x).unsqueeze(-1) * _turn(angles).unsqueeze(2).transpose(-1, -2)
    return torch.view_as_real(value).flatten(2)


def _swapped(x: Tensor, angles: Tensor) -> Tensor:
    return torch.view_as_real((_complex(x) * _turn(angles)).transpose(-1, 0)).flatten(1)


def _cut(x: Tensor, angles: Tensor) -> Tensor:
    return torch.view_as_real((_complex(x) * _turn(angles))[..., 1:3]).flatten(2)


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return self.function(x, angles)


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 5, 8, generator=generator), torch.randn(2, 5, 4, generator=generator)


def _export(function: Function) -> torch.export.ExportedProgram:
    tokens = torch.export.Dim("tokens", min=2, max=1024)
    shapes = ({1: tokens}, {1: tokens})
    return torch.export.export(_Module(function), _inputs(), dynamic_shapes=shapes, strict=False)


@pytest.mark.parametrize(
    "function", [_rotation, _scaled, _factor_first, _square, _unsqueezed, _swapped, _cut], ids=lambda f: f.__name__
)
def test_the_numbers_are_the_same_and_nothing_is_complex(function: Function) -> None:
    program = _export(function)
    make_real(program)
    values = [node.meta.get("val") for node in program.graph.nodes]
    assert not any(isinstance(v, Tensor) and v.is_complex() for v in values)
    assert "complex" not in str([node.target for node in program.graph.nodes])
    got = program.graph_module(*_inputs())[0]
    torch.testing.assert_close(got, function(*_inputs()))


def test_the_number_of_tokens_stays_dynamic() -> None:
    program = _export(_rotation)
    make_real(program)
    result = next(iter(reversed(program.graph.nodes))).args[0][0]
    assert [isinstance(size, int) for size in result.meta["val"].shape] == [True, False, True]
    x, angles = torch.randn(2, 9, 8), torch.randn(2, 9, 4)
    torch.testing.assert_close(program.graph_module(x, angles)[0], _rotation(x, angles))


def test_real_programs_are_untouched() -> None:
    program = _export(lambda x, angles: x[..., :4] * angles.cos())
    before = str(program.graph)
    make_real(program)
    assert str(program.graph) == before


@pytest.mark.parametrize(
    "function",
    [
        lambda x, angles: torch.view_as_real(torch.exp(_complex(x))),
        lambda x, angles: torch.fft.fft(_complex(x)).abs(),
        lambda x, angles: _complex(x).conj().abs(),
    ],
)
def test_an_operation_without_a_rule_is_refused(function: Function) -> None:
    with pytest.raises(CaptureError, match=r"complex arithmetic by aten\.\w+"):
        make_real(_export(function))
