"""AutoAWQ's `gemm` layout: integers `[K, N]` of four bits, eight output channels to a word in an order of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.convert.source.base import TensorHandle
from inferencex.convert.source.packed.base import (
    SCALE_TYPES,
    WORD_TYPES,
    PackedStorage,
    Parts,
    expect,
    grouping,
    integer_tensor,
    require,
)
from inferencex.convert.source.packed.settings import group_size_setting, integer_setting
from inferencex.formats.errors import SourceError
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor

METHOD = "awq"
BITS = 4
_COLUMNS_PER_WORD = 8
# The output channel, of each eight, at every place of a word.
CHANNEL_AT_PLACE = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class AwqFormat:
    """What config.json says about an AWQ checkpoint; `group_size` may be -1 for all input channels."""

    group_size: int
    method: str = METHOD
    part_names: tuple[str, ...] = ("qweight", "qzeros", "scales")
    defining: tuple[str, ...] = ("qweight",)
    dropped: tuple[str, ...] = ()
    quantizes_activations: bool = False

    def open(self, module: str, parts: Parts) -> PackedStorage:
        """Check the tensors of one module against each other. Raises SourceError."""
        qweight, qzeros, scales = require(module, parts, self.part_names, "AWQ")
        if len(qweight.shape) != 2:
            raise SourceError(f"{qweight.name}: has shape {list(qweight.shape)}, expected [K, N / 8]")
        channels, words = qweight.shape
        group = channels if self.group_size == -1 else self.group_size
        if channels % group:
            raise SourceError(
                f"{qweight.name}: has {channels} input channels, which groups of {group} (config.json's group_size) "
                "do not divide; config.json and the tensors do not belong together"
            )
        groups = channels // group
        why = f"{channels} input channels in groups of {group}"
        expect(qweight, (channels, words), WORD_TYPES, "eight integers to a word")
        expect(qzeros, (groups, words), WORD_TYPES, why)
        expect(scales, (groups, words * _COLUMNS_PER_WORD), SCALE_TYPES, why)
        return _Storage(module, qweight, qzeros, scales, PER_CHANNEL if group == channels else group)


def read_awq(settings: Mapping[str, Any], where: str) -> AwqFormat:
    """Read `quantization_config` of method `awq`. Raises SourceError for what is not AutoAWQ's gemm layout."""
    bits = integer_setting(settings, "bits", where)
    if bits != BITS:
        raise SourceError(f"{where}: AWQ of {bits} bits is not a layout that is known; expected {BITS}")
    version = str(settings.get("version", settings.get("format", "gemm"))).lower()
    if version != "gemm":
        raise SourceError(f"{where}: AWQ weights in the layout {version!r} are not read, only those of 'gemm'")
    backend = str(settings.get("backend", "autoawq")).lower()
    if backend == "llm-awq":
        raise SourceError(f"{where}: weights of llm-awq are packed in a layout that is not read, only AutoAWQ's are")
    return AwqFormat(group_size_setting(settings, where))


@dataclass(frozen=True)
class _Storage:
    module: str
    qweight: TensorHandle
    qzeros: TensorHandle
    scales: TensorHandle
    group_size: int
    method: str = METHOD
    bits: int = BITS

    @property
    def format(self) -> str:
        return f"AWQ, {grouping(self.bits, self.group_size)}"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.scales.shape[1], self.qweight.shape[0])

    @property
    def parts(self) -> Sequence[TensorHandle]:
        return (self.qweight, self.qzeros, self.scales)

    def input_order(self) -> None:
        return None

    def read(self, start: int, stop: int) -> QuantizedTensor:
        words = slice(start // _COLUMNS_PER_WORD, -(-stop // _COLUMNS_PER_WORD))
        return integer_tensor(
            self.module,
            _channels(self.qweight.load()[:, words].numpy()),
            self.scales.load()[:, start:stop].T,
            _channels(self.qzeros.load()[:, words].numpy()),
            bits=BITS,
            group_size=self.group_size,
        )


def _channels(words: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the integers of words `[rows, N / 8]` as `[N, rows]`."""
    turned = np.ascontiguousarray(words.view(np.uint32).T)
    channels = np.empty((turned.shape[0], _COLUMNS_PER_WORD, turned.shape[1]), dtype=np.uint8)
    for place, channel in enumerate(CHANNEL_AT_PLACE):
        channels[:, channel] = (turned >> np.uint32(place * BITS)) & np.uint32(0xF)
    return channels.reshape(-1, turned.shape[1])
