"""What instructions read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inferencex.runtime.backends.triton.lowering.constants import Constants
from inferencex.runtime.backends.triton.lowering.context import Lowering


class NoConstants:
    """Nothing is static; values of a step are on `device`."""

    def __init__(self, device: str) -> None:
        self.device, self.dtype = torch.device(device), torch.float32

    def __contains__(self, value: object) -> bool:
        return False


class Operators(TorchDispatchMode):
    """Keeps the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


NUMBERS = [torch.tensor(5), torch.tensor([2, -1]), torch.tensor([[True, False]]), torch.zeros(0, dtype=torch.int64)]


def read(numbers: Tensor, device: str) -> tuple[Tensor, list[str]]:
    lowering = Lowering(cast(Any, None), cast(Constants, NoConstants(device)), cast(Any, None), 8, on_host={"shape"})
    value = lowering.read(cast(Any, SimpleNamespace(name="shape")))
    with Operators() as operators:
        found = value({"shape": numbers})
    return found, operators.names


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_numbers_of_shapes_reach_a_device_without_a_copy(numbers: Tensor) -> None:
    """A copy from ordinary memory waits for the device, which is an error while a step is recorded."""
    found, operators = read(numbers, "meta")
    assert (found.shape, found.dtype, found.device.type) == (numbers.shape, numbers.dtype, "meta")
    assert not [name for name in operators if "copy" in name], operators
    assert torch.equal(read(numbers, "cpu")[0], numbers)
