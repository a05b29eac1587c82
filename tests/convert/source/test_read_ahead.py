"""Reading a checkpoint in the background changes nothing but the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from inferencex.convert.source.base import Checkpoint
from inferencex.convert.source.read_ahead import KeptTensor, read_ahead
from inferencex.formats.errors import SourceError


class Counting:
    """A handle that counts how often it is read, and may be broken."""

    def __init__(self, shape: tuple[int, ...] = (4, 3), broken: bool = False) -> None:
        self.name, self.shape, self.dtype, self.stored, self.nbytes = "w", shape, torch.float32, "Q4_1", 48
        self.broken, self.reads = broken, 0

    def load(self) -> torch.Tensor:
        self.reads += 1
        if self.broken:
            raise SourceError("w: truncated")
        return torch.arange(12.0).reshape(4, 3)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.load()[start:stop]


def _checkpoint(kind: str, *handles: Counting) -> Checkpoint:
    fields: Any = dict.fromkeys(("name", "revision", "config", "config_dict", "files", "weight_files", "directory"))
    base = Checkpoint(kind=cast(Any, kind), tensors={}, trust_remote_code=False, **fields)
    return replace(base, tensors={str(index): handle for index, handle in enumerate(handles)})


def test_a_tensor_is_read_once_and_is_the_same() -> None:
    handle = Counting()
    (kept,) = read_ahead(_checkpoint("gguf", handle)).tensors.values()
    assert torch.equal(kept.load(), torch.arange(12.0).reshape(4, 3))
    assert torch.equal(kept.rows(1, 3), kept.load()[1:3])
    assert handle.reads == 1
    assert (kept.name, kept.shape, kept.dtype, kept.stored, kept.nbytes) == ("w", (4, 3), torch.float32, "Q4_1", 48)


def test_errors_reach_whoever_needs_the_tensor() -> None:
    (kept,) = read_ahead(_checkpoint("gguf", Counting(broken=True))).tensors.values()
    with pytest.raises(SourceError, match="truncated"):
        kept.load()


@pytest.mark.parametrize(
    "checkpoint", [_checkpoint("local", Counting()), _checkpoint("gguf", Counting((1 << 15, 1 << 15)))]
)
def test_others_stay_on_disk(checkpoint: Checkpoint) -> None:
    assert read_ahead(checkpoint) is checkpoint
    assert not any(isinstance(handle, KeptTensor) for handle in checkpoint.tensors.values())
