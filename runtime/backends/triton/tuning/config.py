"""One way to launch a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Config:
    """The sizes of a kernel's tiles and what Triton is told besides.

    blocks:     the kernel's constants that are tuned, by name
    num_warps:  warps of a program
    num_stages: turns of a loop whose reads are under way at a time
    """

    blocks: tuple[tuple[str, int], ...]
    num_warps: int = 4
    num_stages: int = 2

    @classmethod
    def of(cls, num_warps: int = 4, num_stages: int = 2, **blocks: int) -> Config:
        """Return a configuration with `blocks` by name, in the order of their names."""
        return cls(tuple(sorted(blocks.items())), num_warps, num_stages)

    def __getitem__(self, name: str) -> int:
        return self.constants[name]

    @cached_property
    def constants(self) -> Mapping[str, int]:
        """The blocks by name."""
        return dict(self.blocks)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {"blocks": dict(self.blocks), "num_warps": self.num_warps, "num_stages": self.num_stages}

    @classmethod
    def from_json(cls, data: Any) -> Config:
        """Undo `to_json`. Raises ValueError for anything else."""
        if not isinstance(data, dict) or not isinstance(data.get("blocks"), dict):
            raise ValueError(f"{str(data)[:80]} is no configuration of a kernel")
        numbers = (*data["blocks"].values(), data.get("num_warps"), data.get("num_stages"))
        if not all(type(number) is int and 0 < number < 1 << 20 for number in numbers):
            raise ValueError(f"{str(data)[:80]} has sizes that are no positive integers")
        return cls.of(data["num_warps"], data["num_stages"], **data["blocks"])
