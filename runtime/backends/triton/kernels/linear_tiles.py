"""How products with quantized weights are launched: what decides it, the defaults, and the space that is searched.

For a number of tokens T rounded up to a power of two:

    BLOCK_N  rows of a tile      32, 64, 128; from 65 tokens on 64, 128, 256
    BLOCK_T  tokens of a tile    8 (CUDA) or 16 for few; T, up to 128; 256 on sm_90 from 256 tokens on
    SPLITS   parts of K          those that the default's rule gives for the tile, half of them, twice as many
    warps    4; also 2 for 32 rows, also 8 for 64 x 128, and 8 beyond
    stages   2, 3, 4, and 5 up to 64 tokens (CUDA); 1, 2 (AMD)

Tiles are of at most 128 x 128 numbers, 128 x 256 on sm_90, 64 x 128 on gfx1100.

float32 has its default alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton

from inferencex.runtime.backends.triton.kernels.chips import device_target, is_nvidia, processors
from inferencex.runtime.backends.triton.kernels.variant import TARGETS, Target
from inferencex.runtime.backends.triton.tuning import Config, bucket_of, configuration, remembered
from inferencex.runtime.backends.triton.weights import Format, LinearWeight

Scaling = Literal["channel", "after", "before", "elements"]
"""Where scales are applied (kernels/quantized_linear.py)."""

KERNEL = "quantized_linear"
"""The name under which configurations are kept."""

_FEW = 16
"""Tokens up to which the weight's bytes are the cost, whatever the tile."""

_LARGEST_TILE: dict[Target, int] = {"sm_80": 128 * 128, "sm_90": 128 * 256, "gfx942": 128 * 128, "gfx1100": 64 * 128}
"""Rows times tokens: larger ones take more registers than there are."""

TRITON_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "u8"}
"""Triton's names of element types."""


@dataclass(frozen=True)
class Shape:
    """What decides how a quantized product is launched; one of these is a shape class, but for the bucket of T.

    group is 0 for one scale a row; panels and slice are those of the weight's layout.
    """

    format: Format
    dtype: torch.dtype
    rows: int
    features: int
    group: int
    panel: int
    slice: int
    is_symmetric: bool

    @classmethod
    def of(cls, weight: LinearWeight, dtype: torch.dtype) -> Shape:
        """Return the shape of products with `weight`."""
        return cls(
            weight.format,
            dtype,
            weight.out_features,
            weight.in_features,
            0 if weight.is_per_channel else weight.group_size,
            weight.panel,
            weight.slice_features,
            weight.zero_points is None,
        )

    @property
    def panels(self) -> int:
        """Panels of the weight."""
        return -(-self.features // self.panel)

    def class_for(self, tokens: int) -> str:
        """Return the name of the shape class."""
        scheme = f"{self.format} g{self.group}{'' if self.is_symmetric else ' z'} {TRITON_TYPES[self.dtype]}"
        return f"{scheme} N{self.rows} K{self.features} T{bucket_of(tokens)}"

    def scaling(self, tokens: int) -> Scaling:
        """Return where scales are applied for a number of tokens."""
        if self.group == 0:
            return "channel"
        whole_slices, whole_groups = self.group % self.slice == 0, self.slice % self.group == 0
        if not whole_slices and not (whole_groups and self.format == "e2m1"):
            return "elements"
        if self.group % self.panel == 0 or (whole_slices and self.format != "e2m1" and tokens <= 2 * _FEW):
            return "after"
        return "after" if self.dtype == torch.float32 and whole_slices else "before"


@remembered
def configuration_of(shape: Shape, bucket: int, device: torch.device) -> Config:
    """Return the configuration for a bucket of tokens on a device: what was measured there, else the default."""
    options = candidates(shape, bucket, device_target(device), processors(device))
    return configuration(KERNEL, shape.class_for(bucket), options, device)


def _interpreted(shape: Shape, tokens: int) -> Config:
    """Return large tiles: numpy computes one at a time."""
    wide = min(1 << (shape.rows - 1).bit_length(), 512)
    return Config.of(4, 1, BLOCK_N=max(wide, 16), BLOCK_T=min(max(bucket_of(tokens), 16), 256), SPLITS=1)


def default_config(shape: Shape, tokens: int, target: Target | None, multiprocessors: int) -> Config:
    """Return a configuration that works on a kind of chip, or (None) in the interpreter, unmeasured.

    Tiles are those that spill no registers (tests compile them); parts of K are as many as give every multiprocessor
    four programs for few tokens, one or two for many.
    """
    if target is None:
        return _interpreted(shape, tokens)
    config = _tile(shape, tokens, target, multiprocessors)
    splits = _splits(shape, tokens, config["BLOCK_N"], config["BLOCK_T"], multiprocessors)
    return Config.of(config.num_warps, config.num_stages, **{**config.constants, "SPLITS": splits})


def _splits(shape: Shape, tokens: int, block_n: int, block_t: int, multiprocessors: int) -> int:
    tiles = triton.cdiv(shape.rows, block_n) * triton.cdiv(tokens, block_t)
    wanted = (4 if tokens <= _FEW else 2 if tokens <= 64 else 1) * multiprocessors
    splits = 1
    while splits < 16 and tiles * splits * 2 <= wanted and shape.panels >= splits * 2 * 4:
        splits *= 2
    return splits


def _tile(shape: Shape, tokens: int, target: Target, multiprocessors: int) -> Config:
    is_cuda = is_nvidia(target)
    if shape.dtype == torch.float32:
        return Config.of(4, 2, BLOCK_N=16 if target == "gfx1100" else 32, BLOCK_T=16, SPLITS=1)
    if shape.scaling(tokens) == "elements":  # which takes a register for each scale
        return Config.of(4, 3 if is_cuda else 2, BLOCK_N=32, BLOCK_T=16, SPLITS=1)
    if tokens <= _FEW:
        block_n = 128 if shape.rows >= 64 * multiprocessors or (is_cuda and _is_wide(shape, multiprocessors)) else 64
        return Config.of(
            4, 4 if is_cuda else 2, BLOCK_N=block_n, BLOCK_T=8 if tokens <= 8 and is_cuda else 16, SPLITS=1
        )
    if target == "gfx1100":
        return Config.of(4, 2, BLOCK_N=64, BLOCK_T=32, SPLITS=1)
    if tokens <= 64:
        return Config.of(4, 3 if is_cuda else 2, BLOCK_N=64, BLOCK_T=32 if tokens <= 32 else 64, SPLITS=1)
    return Config.of(8, 3 if is_cuda else 2, BLOCK_N=128, BLOCK_T=64 if target == "sm_80" else 128, SPLITS=1)


def _is_wide(shape: Shape, multiprocessors: int) -> bool:
    """Tell whether tiles of 128 rows are better: groups are short, so that instructions count, which are fewer then.

    And there are enough such tiles, with K split as far as it may be, to keep every multiprocessor busy.
    """
    programs = triton.cdiv(shape.rows, 128) * min(16, max(1, shape.panels // 4))
    return 0 < shape.group < shape.panel and bool(programs >= 1.5 * multiprocessors)


def candidates(shape: Shape, tokens: int, target: Target | None, multiprocessors: int) -> list[Config]:
    """Return the configurations that are worth measuring, the default first; in the interpreter those of all chips."""
    found = [default_config(shape, tokens, target, multiprocessors)]
    if target is None:
        half = replace(shape, dtype=torch.float16)
        for each in TARGETS:
            found += candidates(half, tokens, each, multiprocessors)
    elif shape.dtype != torch.float32:
        found += _searched(shape, tokens, target, multiprocessors)
    return list(dict.fromkeys(found))


def _warps(block_n: int, size: int) -> tuple[int, ...]:
    if block_n == 32:
        return 2, 4
    if size > 64 * 128:
        return (8,)
    return (4, 8) if size == 64 * 128 else (4,)


def _stages(tokens: int, target: Target) -> tuple[int, ...]:
    if not is_nvidia(target):
        return 1, 2
    return (2, 3, 4, 5) if tokens <= 64 else (2, 3, 4)


def _searched(shape: Shape, tokens: int, target: Target, multiprocessors: int) -> list[Config]:
    is_cuda = is_nvidia(target)
    blocks_t = [8 if is_cuda and tokens <= 8 else 16] if tokens <= _FEW else [min(bucket_of(tokens), 128)]
    if tokens > 64:
        blocks_t.append(64)
    if tokens >= 256 and target == "sm_90":
        blocks_t.append(256)
    found = []
    for block_t in blocks_t:
        for block_n in (32, 64, 128) if tokens <= 64 else (64, 128, 256):
            size = block_n * block_t
            if size > _LARGEST_TILE[target]:
                continue
            usual = _splits(shape, tokens, block_n, block_t, multiprocessors)
            for splits in (usual, usual // 2, usual * 2):
                if not 1 <= splits <= 16 or (splits > 1 and shape.panels < 2 * splits):
                    continue
                for warps in _warps(block_n, size):
                    for stages in _stages(tokens, target):
                        found.append(Config.of(warps, stages, BLOCK_N=block_n, BLOCK_T=block_t, SPLITS=splits))
    return found
