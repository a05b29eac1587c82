"""A quantized weight that can be learned: its integers, scales and zero points move, its format does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferencex.convert.quantize.refine.adam import Adam
from inferencex.formats.errors import QuantizationError
from inferencex.formats.packing import PER_CHANNEL, IntegerArray, QuantizedTensor, group_count, pack_bits

_HALF_RANGE = (2.0**-14, 65504.0)
# An integer as it was chosen stays chosen until gradients insist, also where the source is nearer to another: error
# propagation and earlier refinements chose it for a reason, and the noise of gradients alone should not undo that.
_INSIDE = 0.45


@dataclass(frozen=True)
class Rates:
    """How far one step moves what is learned; 0 leaves it as it is.

    rounding:  in integers: a weight whose gradients keep one sign moves by one integer in 1 / rate steps
    scales:    relative to the scale
    zeros:     in integers
    plain:     relative to the mean size of the tensor's elements
    """

    rounding: float = 5e-3
    scales: float = 5e-4
    zeros: float = 5e-3
    plain: float = 5e-4


class LearnableWeight:
    """Holds a real-valued position behind every integer, and moves it by gradients of the dequantized weight.

    With p the position in units of the scale s, z the zero point, and lo..hi the integers of the format, the weight is
    `(clip(round(p + z), lo, hi) - z) * s`, exactly what is stored. Rounding is differentiated as if it were not there
    (the straight-through estimate), and clipping as it is: where an integer is at its end, the gradient belongs to
    the zero point, which shifts the range that the group can express and nothing else (LSQ+, arXiv 2004.09576).

    Not safe to use from several threads at once.
    """

    def __init__(self, name: str, tensor: QuantizedTensor, source: Tensor | None = None) -> None:
        """Begin at `tensor`. Positions begin at its integers, or towards `source`, the weight it stands for.

        Raises QuantizationError when `source` has another shape, and when the tensor holds floats.
        """
        if tensor.number != "int":
            raise QuantizationError(f"{name}: holds {tensor.number} numbers; only integers are refined")
        if source is not None and tuple(source.shape) != tensor.shape:
            raise QuantizationError(
                f"{name}: the source's shape {list(source.shape)} is not the quantized weight's {list(tensor.shape)}"
            )
        self._tensor = tensor
        channels = tensor.shape[-1]
        self._group = channels if tensor.group_size == PER_CHANNEL else tensor.group_size
        groups = group_count(channels, self._group)
        self._channels, self._padded = channels, groups * self._group
        signed = tensor.bits == 8 or tensor.symmetric
        self._low = float(-(1 << (tensor.bits - 1))) if signed else 0.0
        self._high = self._low + float((1 << tensor.bits) - 1)
        zeros = tensor.zero_point_integers()
        self._scales = torch.from_numpy(tensor.scales.astype(np.float32)).reshape(-1, groups)
        self._zeros = (
            torch.zeros_like(self._scales)
            if zeros is None
            else torch.from_numpy(zeros.astype(np.float32)).reshape(-1, groups)
        )
        self._first_scales, self._log_scales = self._scales, torch.zeros_like(self._scales)
        self._positions = self._grouped(torch.from_numpy(tensor.integers().astype(np.float32))) - self._zeros[..., None]
        self._zero_positions = self._zeros.clone()
        if source is not None:
            wanted = self._grouped(source.detach()) / self._scales[..., None]
            wanted = torch.where(torch.isfinite(wanted), wanted, self._positions)
            self._positions += (wanted - self._positions).clamp_(-_INSIDE, _INSIDE)
        self._optimizers = {
            "positions": Adam(self._positions),
            "log_scales": Adam(self._log_scales),
            "zero_positions": Adam(self._zero_positions),
        }

    def dequantized(self) -> Tensor:
        """Return the weight as it would be stored, float32 in the tensor's shape."""
        weight = (self._integers() - self._zeros[..., None]) * self._scales[..., None]
        return weight.reshape(-1, self._padded)[:, : self._channels].reshape(self._tensor.shape)

    def step(self, gradient: Tensor, rates: Rates, fraction: float) -> None:
        """Move against `gradient`, float32 of the weight's shape; `fraction` is how much of the rates to use now."""
        slope = self._grouped(gradient) * self._scales[..., None]
        raw = (self._positions + self._zeros[..., None]).round_()
        clipped = (raw < self._low) | (raw > self._high)
        if rates.scales:
            steps_of_scale = raw.clamp(self._low, self._high).sub_(self._zeros[..., None])
            self._move("log_scales", (slope * steps_of_scale).sum(-1), rates.scales * fraction)
        if rates.zeros and not self._tensor.symmetric:
            self._move("zero_positions", -(slope * clipped).sum(-1), rates.zeros * fraction)
        if rates.rounding:
            self._move("positions", slope.masked_fill_(clipped, 0.0), rates.rounding * fraction)
        self._refresh()

    def quantized(self) -> QuantizedTensor:
        """Return the weight as it is now, in the format of the one it began with."""
        first = self._tensor
        integers = self._integers().reshape(-1, self._padded)[:, : self._channels].reshape(first.shape)
        zeros = None if first.zero_points is None else self._packed(self._zeros.reshape(first.scale_shape))
        scales = self._scales.numpy().astype(first.scales.dtype).reshape(first.scale_shape)
        values = self._packed(integers)
        return replace(first, values=values, scales=scales, zero_points=zeros)

    def state(self) -> dict[str, Tensor]:
        """Return what `load_state` needs to go on from here, by name."""
        state = {name: getattr(self, f"_{name}") for name in self._optimizers}
        for name, optimizer in self._optimizers.items():
            state |= {f"{name}.{key}": value for key, value in optimizer.state().items()}
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from a state of a weight that began with the same tensor."""
        for name, optimizer in self._optimizers.items():
            getattr(self, f"_{name}").copy_(state[name])
            prefix = f"{name}."
            optimizer.load_state({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
        self._refresh()

    def _move(self, name: str, gradient: Tensor, rate: float) -> None:
        self._optimizers[name].update(getattr(self, f"_{name}"), gradient, rate)

    def _refresh(self) -> None:
        """Derive from what is learned what is stored: scales as their dtype has them, whole zero points."""
        scales = self._first_scales * self._log_scales.exp()
        if self._tensor.scales.dtype == np.float16:
            scales = torch.where(self._first_scales != 0.0, scales.clamp_(*_HALF_RANGE), scales).half().float()
        self._scales = scales
        if not self._tensor.symmetric:
            self._zero_positions.clamp_(self._low, self._high)
            self._zeros = self._zero_positions.round()

    def _integers(self) -> Tensor:
        """Return the integers, float32 `[rows, groups, group]`; those that pad the last group mean nothing."""
        return (self._positions + self._zeros[..., None]).round_().clamp_(self._low, self._high)

    def _grouped(self, tensor: Tensor) -> Tensor:
        """Return float32 `[rows, groups, group]`, the last group padded with zeros."""
        rows = tensor.to(torch.float32).reshape(-1, self._channels)
        if self._padded != self._channels:
            rows = torch.nn.functional.pad(rows, (0, self._padded - self._channels))
        return rows.reshape(len(rows), -1, self._group)

    def _packed(self, integers: Tensor) -> IntegerArray:
        array: NDArray[np.int8] = integers.numpy().astype(np.int8)
        return array if self._tensor.bits == 8 else pack_bits(array, self._tensor.bits)
