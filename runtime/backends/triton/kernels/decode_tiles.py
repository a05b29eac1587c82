"""How decode attention is launched: the blocks of each family of chips, and the configurations that are measured."""

from __future__ import annotations

import itertools

import torch
import triton

from inferencex.runtime.backends.triton.attention_tiles import SPLITS, DecodeLimits, most_splits, split_keys
from inferencex.runtime.backends.triton.kernels.attention_step import Blocks, Family, HeadShape, family_of
from inferencex.runtime.backends.triton.kernels.split_sums import floats_of
from inferencex.runtime.backends.triton.tuning import Config, configuration, remembered

KERNEL = "decode_attention"
"""The name under which configurations are kept."""


def decode_blocks(family: Family, key_width: int, value_width: int, group: int, itemsize: int) -> Blocks:
    """Return the blocks of decode for heads of these widths, `group` query heads to a KV head.

    Stages are those of prefill: with five, two blocks of keys and values are under way, 64 KiB of a program on sm_90.
    """
    widest = max(key_width, value_width)
    if itemsize == 4:
        return Blocks(16, 32, 8, 1, 16)
    if widest > 256:
        stages = {"ampere": 2, "hopper": 5}.get(family, 1)
        return Blocks(16, 16, 4, stages, 64 if family == "rdna" else 0)
    if family == "hopper":
        rows = max(16, min(64, triton.next_power_of_2(group)))
        return Blocks(rows, 32, 4, 5) if widest > 128 else Blocks(rows, 64, 8, 5)
    if family == "ampere":
        return Blocks(16, 32, 4, 5 if widest <= 128 else 3)
    if family == "cdna" or widest <= 64:
        return Blocks(16, 32, 4, 1)
    return Blocks(16, 32, 4, 1, 64 if widest > 128 else 32)


def _split(shape: HeadShape) -> int:
    return split_keys(
        shape.num_heads, shape.num_kv_heads, shape.key_width, shape.value_width, shape.page_dtype.itemsize
    )


def decode_options(shape: HeadShape, family: Family) -> list[Config]:
    """Return the configurations that are worth measuring, the default first.

    BLOCK_N  keys at a time            32, 64, 128
    SPLIT    keys that a program takes 256, 512, 1024
    warps    4, 8; stages 2, 3, 5 (CUDA), 1, 2 (AMD)

    Heads whose queries are not kept in registers, and float32 on a GPU, differ in SPLIT alone. What is chosen holds for
    every batch and context: a sequence's result depends on SPLIT, and must not depend on others.
    """
    blocks = blocks_of(shape, family)
    found = [Config.of(blocks.num_warps, blocks.num_stages, BLOCK_N=blocks.keys, SPLIT=_split(shape))]
    found += [Config.of(blocks.num_warps, blocks.num_stages, BLOCK_N=blocks.keys, SPLIT=split) for split in SPLITS]
    if blocks.key_step == 0:
        stages = (2, 3, 5) if family in ("ampere", "hopper") else (1, 2)
        for keys, split, warps, ahead in itertools.product((32, 64, 128), SPLITS, (4, 8), stages):
            found.append(Config.of(warps, ahead, BLOCK_N=keys, SPLIT=split))
    return list(dict.fromkeys(found))


def blocks_of(shape: HeadShape, family: Family) -> Blocks:
    """Return the blocks of decode for layers of a shape."""
    return decode_blocks(family, shape.key_width, shape.value_width, shape.group, shape.dtype.itemsize)


@remembered
def configuration_of(shape: HeadShape, device: torch.device) -> Config:
    """Return the configuration on a device: what was measured there, else the default."""
    return configuration(KERNEL, shape.name, decode_options(shape, family_of(device)), device)


def most_floats(shape: HeadShape, device: torch.device, limits: DecodeLimits, longest_context: int) -> int:
    """Return the floats that a launch leaves at most, of layers of a shape; none where each context is one split."""
    split = configuration_of(shape, device)["SPLIT"]
    if most_splits(longest_context, split, 0, 0) == 1:
        return 0
    return floats_of(shape.num_heads, shape.value_width, split, limits)
