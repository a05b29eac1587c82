"""How products with experts' weights are launched: the defaults, and the space that is searched.

For tiles of 16, 32 or 64 assignments, which `tile_of` chooses by what an expert gets on average:

    BLOCK_N  rows of a weight    32, 64, 128
    BLOCK_K  features at a time  32, 64, 128 for plain weights; quantized ones go by panels, and have 1 here
    warps    4, 8; stages 2, 3, 4 (CUDA), 1, 2 (AMD)

float32 has its default alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inferencex.runtime.backends.triton.kernels.chips import device_target, is_nvidia
from inferencex.runtime.backends.triton.kernels.variant import TARGETS, Target
from inferencex.runtime.backends.triton.tuning import Config, configuration, remembered
from inferencex.runtime.backends.triton.weights import Format, LinearWeight

KERNEL = "grouped_linear"
"""The name under which configurations are kept."""

TILES = (16, 32, 64)
"""Assignments that a tile can have."""


@dataclass(frozen=True)
class GroupedShape:
    """What decides how a grouped product is launched, and names its shape class.

    group is 0 for one scale a row and for plain weights; tile is that of the routing.
    """

    format: Format
    group: int
    is_symmetric: bool
    dtype: torch.dtype
    experts: int
    columns: int
    depth: int
    tile: int

    @classmethod
    def of(cls, weight: LinearWeight, dtype: torch.dtype, tile: int) -> GroupedShape:
        """Return the shape of products with a stack in tiles of so many assignments."""
        group = 0 if weight.format == "plain" or weight.is_per_channel else weight.group_size
        symmetric = weight.zero_points is None
        size = (weight.experts, weight.out_features, weight.in_features)
        return cls(weight.format, group, symmetric, dtype, *size, tile)

    @property
    def name(self) -> str:
        """The name of the shape class."""
        scheme = f"{self.format} g{self.group}{'' if self.is_symmetric else ' z'}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{scheme} {dtype} E{self.experts} N{self.columns} K{self.depth} tile{self.tile}"


@remembered
def configuration_of(shape: GroupedShape, device: torch.device) -> Config:
    """Return the configuration on a device: what was measured there, else the default."""
    return configuration(KERNEL, shape.name, candidates(shape, device_target(device)), device)


def default_config(shape: GroupedShape, target: Target | None) -> Config:
    """Return a configuration that works on a kind of chip, or (None) in the interpreter, unmeasured."""
    if target is None:
        return _config(shape, 64, 64, 4, 1)
    if shape.dtype == torch.float32:
        return _config(shape, 32, 32, 4, 2)
    if not is_nvidia(target):  # 64 KiB of shared memory, and on RDNA 256 registers
        return _config(shape, 64, 64, 8 if shape.tile == 64 and target == "gfx1100" else 4, 2)
    return _config(shape, 128, 64, 8, 3) if shape.tile == 64 else _config(shape, 64, 64, 4, 3)


def _config(shape: GroupedShape, block_n: int, block_k: int, warps: int, stages: int) -> Config:
    return Config.of(warps, stages, BLOCK_N=block_n, BLOCK_K=block_k if shape.format == "plain" else 1)


def candidates(shape: GroupedShape, target: Target | None) -> list[Config]:
    """Return the configurations that are worth measuring, the default first; in the interpreter those of all chips."""
    found = [default_config(shape, target)]
    if target is None or shape.dtype != torch.float32:
        for each in TARGETS if target is None else (target,):
            for block_n in (32, 64, 128):
                for block_k in (32, 64, 128) if shape.format == "plain" else (1,):
                    for warps in (4, 8):
                        for stages in (2, 3, 4) if is_nvidia(each) else (1, 2):
                            found.append(_config(shape, block_n, block_k, warps, stages))
    return list(dict.fromkeys(found))
