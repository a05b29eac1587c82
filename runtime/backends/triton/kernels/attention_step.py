"""What the kernels of attention are given: a step, planned once for all layers, and a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.triton.kernels.attention_keys import parts_of
from inferencex.runtime.backends.triton.kernels.kv_pages import KVPages, PageFormat, Scaling
from inferencex.runtime.backends.triton.kernels.split_sums import SplitSums

Family = Literal["ampere", "hopper", "cdna", "rdna"]
"""Chips that want the same blocks: NVIDIA's before sm_90 or for desktops, NVIDIA's others, AMD's with waves of 64,
AMD's with waves of 32.

Shared memory of a program is at most 99 KiB on the smallest of the first, 227 KiB on the second, 64 KiB on AMD's.
"""


@dataclass(frozen=True)
class AttentionStep:
    """A step as attention of every layer sees it; tensors on the device, planned once on the host.

    slots:            int64 [T], flat slot of each new token; negative for rows that fill up a batch
    sequence_offsets: int32 [S + 1]
    context_lengths:  int32 [S], 0 for sequences that fill up a batch
    block_tables:     int32 [S, B]
    tiles:            int32 [n, 2], of `plan_tiles`
    tile_rows:        rows of a tile, that `tiles` were planned with
    decode_sequences: int32 [D], sequences with one new token
    decode_groups:    how many of these, one after the other, each launch of decode takes
    keys_before:      int64 [D], keys of the sequences before it in its group
    longest_context:  bound of the contexts of `decode_sequences`: the grid of decode depends on it, no result does
    sums:             where splits of decode leave their sums; None for memory that each launch reserves
    """

    slots: Tensor
    sequence_offsets: Tensor
    context_lengths: Tensor
    block_tables: Tensor
    tiles: Tensor
    tile_rows: int
    decode_sequences: Tensor
    decode_groups: tuple[int, ...]
    keys_before: Tensor
    longest_context: int
    sums: SplitSums | None = None

    def __post_init__(self) -> None:
        """Check types and shapes. Raises BackendError."""
        sequences = self.context_lengths.shape[0]
        expected = {
            "slots": (torch.int64, self.slots.shape[:1]),
            "sequence_offsets": (torch.int32, (sequences + 1,)),
            "context_lengths": (torch.int32, (sequences,)),
            "block_tables": (torch.int32, (sequences, self.block_tables.shape[-1])),
            "tiles": (torch.int32, (self.tiles.shape[0], 2)),
            "decode_sequences": (torch.int32, self.decode_sequences.shape[:1]),
            "keys_before": (torch.int64, self.decode_sequences.shape[:1]),
        }
        for name, (dtype, shape) in expected.items():
            found: Tensor = getattr(self, name)
            apart = found.numel() > 1 and found.shape[-1] > 1 and found.stride(-1) != 1
            if found.dtype != dtype or found.shape != shape or apart:
                raise BackendError(
                    f"{name} of a step is {found.dtype} {list(found.shape)} with strides {found.stride()}, "
                    f"expected {dtype} {list(shape)}, the last dimension adjacent"
                )
        if sum(self.decode_groups) != self.decode_sequences.shape[0]:
            raise BackendError(
                f"decode_groups of a step are {self.decode_groups}, of {self.decode_sequences.shape[0]} sequences"
            )


@dataclass(frozen=True)
class AttentionLayer:
    """What sets the attention of a layer apart, the widths and numbers of its heads excepted, which pages have."""

    num_heads: int
    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None

    def constants(self, pages: KVPages) -> dict[str, object]:
        """Return the constants that the kernels of prefill and decode share."""
        return constants_of(
            self.num_heads,
            pages.num_kv_heads,
            pages.key_width,
            pages.value_width,
            block_size=pages.block_size,
            window=self.window,
            chunk=self.chunk,
            softcap=self.softcap,
            sinks=self.sinks is not None,
            alibi=self.slopes is not None,
            page_format=pages.format,
            scaling=pages.scaling,
        )


def constants_of(
    num_heads: int,
    num_kv_heads: int,
    key_width: int,
    value_width: int,
    *,
    block_size: int = 16,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    alibi: bool = False,
    page_format: PageFormat = "plain",
    scaling: Scaling = "none",
) -> dict[str, object]:
    """Return the constants that the kernels of prefill and decode share, of a layer that is described in numbers."""
    key_parts, value_parts = parts_of(key_width), parts_of(value_width)
    return {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "DK": key_width,
        "DV": value_width,
        "BLOCK_SIZE": block_size,
        "WINDOW": window,
        "CHUNK": chunk,
        "SOFTCAP": softcap,
        "SINKS": sinks,
        "ALIBI": alibi,
        "FORMAT": page_format,
        "SCALING": scaling,
        "DK_MAIN": key_parts[0],
        "DK_TAIL": key_parts[1],
        "DV_MAIN": value_parts[0],
        "DV_TAIL": value_parts[1],
    }


@dataclass(frozen=True)
class Blocks:
    """How a kernel of attention cuts its work.

    rows, keys: of a tile of queries and a block of keys; both are tuned for prefill, keys for decode
    num_warps, num_stages: of a program; stages that loads are ahead by
    key_step: columns of queries and keys that are multiplied at once; 0 for all, with queries kept in registers
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    key_step: int = 0


@dataclass(frozen=True)
class HeadShape:
    """What layers have in common that one configuration suits: heads, their widths, and how they are kept.

    dtype: of queries; page_dtype: of keys and values; scaling: what of these has a scale of its own
    """

    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    page_dtype: torch.dtype
    scaling: Scaling

    @classmethod
    def of(cls, num_heads: int, pages: KVPages, dtype: torch.dtype) -> HeadShape:
        """Return the shape of a layer with these pages."""
        widths = (pages.key_width, pages.value_width)
        return cls(num_heads, pages.num_kv_heads, *widths, dtype, pages.keys.dtype, pages.scaling)

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def name(self) -> str:
        """The name of the shape class."""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads {self.key_width}/{self.value_width}"
        dtype, pages = (str(each).removeprefix("torch.") for each in (self.dtype, self.page_dtype))
        return f"{heads} {dtype} over {pages}{'' if self.scaling == 'none' else f' by {self.scaling}'}"


def family_of(device: torch.device) -> Family:
    """Return the family of a device; of the CPU, where kernels are interpreted, the first."""
    if device.type != "cuda":
        return "ampere"
    if torch.version.hip is None:
        return "hopper" if (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0) else "ampere"
    name = torch.cuda.get_device_properties(device).gcnArchName
    return "cdna" if name.startswith("gfx9") else "rdna"
