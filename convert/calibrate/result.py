"""What calibration decided, weight by weight, as the bundle stores it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferencex.convert.calibrate.factors import with_divided_rows
from inferencex.convert.calibrate.work_dir import FinishedBlock, WorkDir
from inferencex.convert.kv_cache import KVLayerReport
from inferencex.convert.layer_report import LayerReport
from inferencex.formats.packing import QuantizedTensor


@dataclass(frozen=True)
class CalibratedWeight:
    """A quantized weight.

    input_range:  largest absolute input over the calibration samples, where inputs have one scale; else None
    """

    tensor: QuantizedTensor
    relative_error: float
    input_range: float | None


class CalibratedWeights:
    """Reads finished blocks weight by weight; what they say nothing of is None.

    layers:     what the report says of each weight, in the order of the model
    kv_layers:  and of the keys and values of each layer of attention, where those are calibrated
    kv_scales:  float32 `[2, G]`, of keys and of values, by layer
    """

    def __init__(self, work: WorkDir, blocks: Sequence[int]) -> None:
        self._work = work
        self._refined: FinishedBlock | None = None
        self._places: dict[str, int] = {}
        self._plain: dict[str, int] = {}
        self.layers: list[LayerReport] = []
        self.kv_layers: list[KVLayerReport] = []
        self.kv_scales: dict[int, NDArray[np.float32]] = {}
        for index in blocks:
            block = work.load(index)
            self._places.update(dict.fromkeys(block.quantized, index))
            self._plain.update(dict.fromkeys(block.plain, index))
            self.kv_layers += [KVLayerReport(**layer) for layer in block.kv_report]
            self.kv_scales.update({int(layer): scales for layer, scales in block.kv_scales.items()})
            self.layers += [LayerReport(**{**layer, "shape": tuple(layer["shape"])}) for layer in block.report]
        self._errors = {layer.name: layer.weight_error for layer in self.layers}

    @property
    def names(self) -> list[str]:
        """The weights that calibration quantized."""
        return list(self._places)

    def refine(self, refined: FinishedBlock) -> None:
        """Take what refinement made instead, where it made something."""
        self._refined = refined

    def quantized(self, name: str) -> CalibratedWeight | None:
        """Return a weight as it is stored, its rows divided by the factors of what reads its outputs."""
        index = self._places.get(name)
        if index is None:
            return None
        block = self._work.load(index)
        tensor, divisors = block.quantized[name], block.row_divisors.get(name)
        if self._refined is not None and name in self._refined.quantized:
            tensor, divisors = self._refined.quantized[name], None
        return CalibratedWeight(
            tensor if divisors is None else with_divided_rows(tensor, divisors),
            self._errors[name],
            block.input_ranges.get(name),
        )

    def plain(self, name: str) -> Tensor | None:
        """Return a tensor that factors changed, float32."""
        if self._refined is not None and name in self._refined.plain:
            return torch.from_numpy(np.array(self._refined.plain[name]))
        index = self._plain.get(name)
        return None if index is None else torch.from_numpy(np.array(self._work.load(index).plain[name]))
