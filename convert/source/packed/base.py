"""What a packed weight is: how it lies in a checkpoint, and the tensor that every layout is read into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from inferencex.convert.source.base import TensorHandle
from inferencex.formats.errors import SourceError
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor, group_count, pack_bits, pack_int4

Parts: TypeAlias = Mapping[str, TensorHandle]
"""The tensors of one module, by the last part of their names."""

# Rows of words and of zero points are packed together in some layouts; a multiple of this many never cuts a word.
ROW_STEP = 32

_SMALLEST_NORMAL_HALF = 2.0**-14


class PackedStorage(Protocol):
    """One weight as a checkpoint stores it, opened and checked, its data not read.

    method:  the method that the checkpoint names: `awq`, `gptq`, ...
    format:  in words, for reports: `AWQ, 4 bits, groups of 128`
    shape:   `[N, K]`, output by input channels
    parts:   the tensors that it is read from, all of them
    """

    @property
    def method(self) -> str:
        """Name of the method."""
        ...

    @property
    def format(self) -> str:
        """How it is stored, in words."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """`[N, K]`."""
        ...

    @property
    def parts(self) -> Sequence[TensorHandle]:
        """The tensors that it is read from."""
        ...

    def input_order(self) -> NDArray[np.int64] | None:
        """Return `[K]`: which input channel is at each place of the tensor that `read` returns; None for as they are.

        Act-order makes groups of channels that are not neighbours. Permuted, they are.
        """
        ...

    def read(self, start: int, stop: int) -> QuantizedTensor:
        """Return rows `start:stop`, `start` being a multiple of `ROW_STEP`. Raises SourceError."""
        ...


@dataclass(frozen=True)
class PackedHandle:
    """A packed weight that can also be read as the float32 tensor it stands for: a `TensorHandle`."""

    name: str
    storage: PackedStorage

    @property
    def shape(self) -> tuple[int, ...]:
        """`[N, K]`, output by input channels."""
        return self.storage.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the dequantized tensor."""
        return torch.float32

    @property
    def stored(self) -> str:
        """The layout in the file, in words."""
        return self.storage.format

    @property
    def nbytes(self) -> int:
        """Bytes in the file, scales and zero points included."""
        return sum(part.nbytes for part in self.storage.parts)

    def packed(self) -> QuantizedTensor:
        """Return the stored integers, scales and zero points, input channels in `input_order`. Raises SourceError."""
        return self.storage.read(0, self.shape[0])

    def input_order(self) -> NDArray[np.int64] | None:
        """Return the input channel at each place of `packed()`, int64 `[K]`; None for 0, 1, 2, ..."""
        return self.storage.input_order()

    def load(self) -> torch.Tensor:
        """Return the weight dequantized, float32. Raises SourceError."""
        return self.rows(0, self.shape[0])

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return `load()[start:stop]`, reading no more than it must."""
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        if stop <= start:
            return torch.empty((0, self.shape[1]), dtype=torch.float32)
        first = start - start % ROW_STEP
        tensor = self.storage.read(first, min(self.shape[0], stop + -stop % ROW_STEP))
        weight = tensor.dequantize()[start - first : stop - first]
        order = self.input_order()
        if order is not None:
            natural = np.empty_like(weight)
            natural[:, order] = weight
            weight = natural
        return torch.from_numpy(weight)


def integer_tensor(
    name: str,
    integers: NDArray[np.uint8],
    scales: torch.Tensor,
    zero_points: NDArray[np.uint8] | None,
    *,
    bits: int,
    group_size: int,
) -> QuantizedTensor:
    """Make a tensor of integers `[N, K]` in 0 .. 2^bits - 1, scales `[N, G]` and zero points `[N, G]`.

    Without zero points, and where all are 2^(bits - 1), the integers become signed and the tensor symmetric, which
    changes no weight. Two bits are stored as four. `name` is for messages; raises SourceError.
    """
    middle = 1 << (bits - 1)
    symmetric = zero_points is None or bool((zero_points == middle).all())
    stored_bits = 4 if bits == 2 else bits

    def packed(values: NDArray[np.uint8]) -> NDArray[Any]:
        coded = values - np.uint8(middle) if symmetric or stored_bits == 8 else values  # wraps to two's complement
        if stored_bits == 8:
            return coded.view(np.int8)
        return pack_int4(coded) if stored_bits == 4 else pack_bits(coded, stored_bits)

    per_channel = group_size == PER_CHANNEL
    kept = None if symmetric else zero_points
    if kept is not None and per_channel:
        kept = kept[:, 0]
    compact = compact_scales(name, scales)
    return QuantizedTensor(
        values=packed(integers),
        scales=compact[:, 0] if per_channel else compact,
        zero_points=None if kept is None else packed(np.ascontiguousarray(kept)),
        bits=stored_bits,
        group_size=group_size,
        symmetric=symmetric,
        shape=(integers.shape[0], integers.shape[1]),
    )


def float8_tensor(name: str, values: torch.Tensor, scales: torch.Tensor, group_size: int) -> QuantizedTensor:
    """Make a tensor of FP8 (E4M3) numbers `[N, K]` with scales `[N, G]`. Raises SourceError."""
    codes = values.contiguous().view(torch.uint8).numpy()
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise SourceError(f"{name}: holds values that are not numbers (NaN); the checkpoint is damaged")
    compact = compact_scales(name, scales)
    return QuantizedTensor(
        values=codes.view(ml_dtypes.float8_e4m3fn),
        scales=compact[:, 0] if group_size == PER_CHANNEL else compact,
        zero_points=None,
        bits=8,
        group_size=group_size,
        symmetric=True,
        shape=(values.shape[0], values.shape[1]),
        number="e4m3",
    )


def compact_scales(name: str, scales: torch.Tensor) -> NDArray[Any]:
    """Return scales as float16 where that changes none of them, else as float32. Raises SourceError."""
    wide = scales.to(torch.float32)
    if not bool(torch.isfinite(wide).all()):
        raise SourceError(f"{name}: its scales are not all finite (NaN or infinity); the checkpoint is damaged")
    half = wide.to(torch.float16)
    exact = (half.to(torch.float32) == wide) & ((half.abs() >= _SMALLEST_NORMAL_HALF) | (half == 0))
    chosen = half if bool(exact.all()) else wide
    array: NDArray[Any] = chosen.contiguous().numpy()
    return array


def groups_of(channels: int, group_size: int) -> int:
    """Return how many scales a row has."""
    return 1 if group_size == PER_CHANNEL else group_count(channels, group_size)


def grouping(bits: int, group_size: int) -> str:
    """Say in words how a weight is quantized."""
    groups = "per channel" if group_size == PER_CHANNEL else f"groups of {group_size}"
    return f"{bits} bits, {groups}"


def require(module: str, parts: Parts, names: Sequence[str], method: str) -> list[TensorHandle]:
    """Return the tensors of a module that its layout needs. Raises SourceError naming those that are missing."""
    missing = [f"{module}.{name}" for name in names if name not in parts]
    if missing:
        present = ", ".join(sorted(parts))
        raise SourceError(
            f"{module}: {method} needs {', '.join(missing)}, which the checkpoint lacks (it has {present}); "
            "the download is incomplete, or the tensors are of another method"
        )
    return [parts[name] for name in names]


def expect(handle: TensorHandle, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], why: str) -> None:
    """Check a tensor's shape and type. Raises SourceError with both."""
    if tuple(handle.shape) != shape or handle.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise SourceError(
            f"{handle.name}: is {str(handle.dtype).removeprefix('torch.')} {list(handle.shape)}, expected {kinds} "
            f"{list(shape)} ({why}); config.json and the tensors do not belong together"
        )


SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)
WORD_TYPES = (torch.int32, torch.uint32)
