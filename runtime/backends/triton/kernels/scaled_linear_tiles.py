"""How products of 8-bit activations and weights are launched: the defaults, and the space that is searched.

For a number of tokens T rounded up to a power of two:

    BLOCK_M  tokens of a tile    T, 16 to 64; from 65 tokens on 64, 128
    BLOCK_N  rows of the weight  32, 64, 128; from 65 tokens on 64, 128, 256
    BLOCK_K  features at a time  64, 128, 256; from 65 tokens on 64, 128
    SPLITS   parts of K          those that the default's rule gives for the tile, half of them, twice as many; 1 from
                                 65 tokens on
    warps    4; 8 too from 64 x 128 on; stages 3, 4 (CUDA), 1, 2 (AMD)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton

from inferencex.runtime.backends.triton.kernels.chips import device_target, is_nvidia, processors
from inferencex.runtime.backends.triton.kernels.variant import TARGETS, Target
from inferencex.runtime.backends.triton.tuning import Config, bucket_of, configuration, remembered

KERNEL = "scaled_linear"
"""The name under which configurations are kept."""

_MOST_SPLITS = 16
_MOST_TOKENS_SPLIT = 64


@dataclass(frozen=True)
class ScaledShape:
    """What decides how a product of 8-bit numbers is launched, but for the number of tokens.

    number:  of activations and weights
    upcasts: whether E4M3 is multiplied as float16
    dtype:   of the result
    columns, depth: N and K
    """

    number: Literal["int8", "e4m3"]
    upcasts: bool
    dtype: torch.dtype
    columns: int
    depth: int

    def class_for(self, tokens: int) -> str:
        """Return the name of the shape class."""
        kind = f"{self.number}{' widened' if self.upcasts else ''} to {str(self.dtype).removeprefix('torch.')}"
        return f"{kind} N{self.columns} K{self.depth} T{bucket_of(tokens)}"


@remembered
def configuration_of(shape: ScaledShape, bucket: int, device: torch.device) -> Config:
    """Return the configuration for a bucket of tokens on a device: what was measured there, else the default."""
    options = candidates(shape, bucket, device_target(device), processors(device))
    return configuration(KERNEL, shape.class_for(bucket), options, device)


def default_config(shape: ScaledShape, tokens: int, target: Target | None, multiprocessors: int) -> Config:
    """Return a configuration that works on a kind of chip, or (None) in the interpreter, unmeasured.

    AMD's have 64 KiB of shared memory and no asynchronous copies to hide latency with; upcast operands take twice the
    registers.
    """
    if target is None:
        return _with_splits(shape, tokens, (16 if tokens <= 16 else 32, 32, 32), 4, 1, multiprocessors)
    is_cuda = is_nvidia(target)
    if tokens <= 16:
        return _with_splits(shape, tokens, (16, 32, 256), 4, 4 if is_cuda else 2, multiprocessors)
    if tokens <= 64:
        block_m = 32 if tokens <= 32 else 64
        return _with_splits(shape, tokens, (block_m, 64, 128), 4, 4 if is_cuda else 2, multiprocessors)
    block_k = 64 if shape.upcasts else 128
    return _with_splits(shape, tokens, (128, 128, block_k), 8, 3 if is_cuda else 2, multiprocessors)


def _with_splits(
    shape: ScaledShape, tokens: int, tile: tuple[int, int, int], warps: int, stages: int, multiprocessors: int
) -> Config:
    splits = splits_of(shape, tokens, tile, multiprocessors)
    return Config.of(warps, stages, BLOCK_M=tile[0], BLOCK_N=tile[1], BLOCK_K=tile[2], SPLITS=splits)


def splits_of(shape: ScaledShape, tokens: int, tile: tuple[int, int, int], multiprocessors: int) -> int:
    """Return among how many programs a tile's features are divided: two for each processor, of four steps or more."""
    if tokens > _MOST_TOKENS_SPLIT:
        return 1
    grid: int = triton.cdiv(tokens, tile[0]) * triton.cdiv(shape.columns, tile[1])
    steps: int = triton.cdiv(shape.depth, tile[2])
    wanted = max(1, min(2 * multiprocessors // grid, steps // 4, _MOST_SPLITS))
    return 1 << (wanted.bit_length() - 1)  # powers of two, so that few are compiled


def candidates(shape: ScaledShape, tokens: int, target: Target | None, multiprocessors: int) -> list[Config]:
    """Return the configurations that are worth measuring, the default first; in the interpreter those of all chips."""
    found = [default_config(shape, tokens, target, multiprocessors)]
    for each in TARGETS if target is None else (target,):
        found += _searched(shape, tokens, each, multiprocessors)
    return list(dict.fromkeys(found))


def _searched(shape: ScaledShape, tokens: int, target: Target, multiprocessors: int) -> list[Config]:
    is_few = tokens <= _MOST_TOKENS_SPLIT
    found = []
    for block_m in (max(16, min(bucket_of(tokens), 64)),) if is_few else (64, 128):
        for block_n in (32, 64, 128) if is_few else (64, 128, 256):
            for block_k in (64, 128, 256) if is_few else (64, 128):
                usual = splits_of(shape, tokens, (block_m, block_n, block_k), multiprocessors)
                for splits in (usual, usual // 2, usual * 2) if is_few else (1,):
                    if not 1 <= splits <= _MOST_SPLITS or (splits > 1 and splits * block_k * 2 > shape.depth):
                        continue
                    for warps in (4, 8) if block_m * block_n >= 64 * 128 else (4,):
                        for stages in (3, 4) if is_nvidia(target) else (1, 2):
                            found.append(
                                Config.of(
                                    warps, stages, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, SPLITS=splits
                                )
                            )
    return found
