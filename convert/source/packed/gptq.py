"""The layouts of AutoGPTQ and GPTQModel: integers `[K, N]`, packed along the input channels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.convert.source.base import TensorHandle
from inferencex.convert.source.packed.act_order import order_of
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
from inferencex.convert.source.packed.bits import WORD, ones_per_field, unpack_words, words_for
from inferencex.convert.source.packed.settings import group_size_setting, integer_setting, one_of
from inferencex.formats.errors import SourceError
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor

METHOD = "gptq"
BITS = (2, 3, 4, 8)
_LAYOUTS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class GptqFormat:
    """What config.json says about a GPTQ checkpoint.

    minus_one:  whether zero points are stored less one (`gptq`), or as they are (`gptq_v2`)
    dynamic:    GPTQModel's exceptions by module: `{regular expression: settings}`, see `of_module`
    """

    bits: int
    group_size: int
    symmetric: bool
    minus_one: bool
    dynamic: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    method: str = METHOD
    part_names: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    defining: tuple[str, ...] = ("qweight",)
    dropped: tuple[str, ...] = ()
    quantizes_activations: bool = False

    def of_module(self, module: str) -> tuple[int, int, bool]:
        """Return bits, group size and symmetry of one module: the first expression that matches its name decides."""
        for pattern, settings in self.dynamic.items():
            if re.match(pattern.removeprefix("+:").removeprefix("-:"), module):
                where = f"config.json: dynamic {pattern!r}"
                if pattern.startswith("-:"):
                    raise SourceError(f"{module}: is packed, but {where} says it is not quantized")
                return (
                    one_of(integer_setting(settings, "bits", where, self.bits), BITS, f"{where}: bits"),
                    group_size_setting(settings, where, self.group_size),
                    bool(settings.get("sym", self.symmetric)),
                )
        return self.bits, self.group_size, self.symmetric

    def open(self, module: str, parts: Parts) -> PackedStorage:
        """Check the tensors of one module against each other. Raises SourceError."""
        qweight, qzeros, scales = require(module, parts, self.part_names[:3], "GPTQ")
        bits, group_size, symmetric = self.of_module(module)
        if len(qweight.shape) != 2 or qweight.shape[0] * WORD % bits:
            raise SourceError(
                f"{qweight.name}: has shape {list(qweight.shape)}, expected [K * {bits} / 32, N] ({bits} bits)"
            )
        channels, rows = qweight.shape[0] * WORD // bits, qweight.shape[1]
        group = channels if group_size == -1 else group_size
        groups = -(-channels // group)
        why = f"{channels} input channels in groups of {group}, {bits} bits"
        expect(qweight, (qweight.shape[0], rows), WORD_TYPES, f"{bits} bits")
        expect(scales, (groups, rows), SCALE_TYPES, why)
        expect(qzeros, (groups, words_for(rows, bits)), WORD_TYPES, why)
        g_idx = parts.get("g_idx")
        if g_idx is not None:
            expect(g_idx, (channels,), WORD_TYPES, "the group of every input channel")
        group = PER_CHANNEL if groups == 1 else group
        return _Storage(module, qweight, qzeros, scales, g_idx, group, bits, symmetric, self.minus_one)


def read_gptq(settings: Mapping[str, Any], where: str) -> GptqFormat:
    """Read `quantization_config` of method `gptq`. Raises SourceError for a layout that is not known."""
    layout = str(settings.get("checkpoint_format", settings.get("format", "gptq"))).lower()
    if layout not in _LAYOUTS:
        raise SourceError(
            f"{where}: GPTQ weights in the layout {layout!r} are not read, only those of {' and '.join(_LAYOUTS)}"
        )
    bits = one_of(integer_setting(settings, "bits", where), BITS, f"{where}: bits")
    group_size = group_size_setting(settings, where)
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(value, dict) for value in dynamic.values()):
        raise SourceError(f"{where}: dynamic is {dynamic!r}, expected an object of settings by regular expression")
    for pattern in dynamic:
        try:
            re.compile(pattern.removeprefix("+:").removeprefix("-:"))
        except re.error as error:
            raise SourceError(f"{where}: dynamic {pattern!r} is not a regular expression ({error})") from error
    return GptqFormat(bits, group_size, bool(settings.get("sym", False)), layout == "gptq", dynamic)


@dataclass(frozen=True)
class _Storage:
    module: str
    qweight: TensorHandle
    qzeros: TensorHandle
    scales: TensorHandle
    g_idx: TensorHandle | None
    group_size: int
    bits: int
    symmetric: bool
    minus_one: bool
    method: str = METHOD

    @property
    def format(self) -> str:
        return f"GPTQ, {grouping(self.bits, self.group_size)}"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.qweight.shape[1], self.qweight.shape[0] * WORD // self.bits)

    @property
    def parts(self) -> Sequence[TensorHandle]:
        optional = () if self.g_idx is None else (self.g_idx,)
        return (self.qweight, self.qzeros, self.scales, *optional)

    def input_order(self) -> NDArray[np.int64] | None:
        if self.g_idx is None:
            return None
        return order_of(self.g_idx, self.shape[1] if self.group_size == PER_CHANNEL else self.group_size)

    def read(self, start: int, stop: int) -> QuantizedTensor:
        integers = unpack_words(self.qweight.load()[:, start:stop].numpy(), self.bits, self.shape[1], axis=0)
        order = self.input_order()
        return integer_tensor(
            self.module,
            np.ascontiguousarray(integers) if order is None else integers[:, order],
            self.scales.load()[:, start:stop].T,
            np.ascontiguousarray(self._zero_points()[:, start:stop].T),
            bits=self.bits,
            group_size=self.group_size,
        )

    def _zero_points(self) -> NDArray[np.uint8]:
        """Return the zero points `[G, N]`."""
        words: NDArray[Any] = self.qzeros.load().numpy().view(np.uint32)
        rows = self.shape[0]
        stored = unpack_words(words, self.bits, rows, axis=1)
        if not self.minus_one:
            return stored
        # The programs that write this layout subtract one from every field of whole words, borrows and all, and
        # those that read it add one in the same way. Fields that were packed one by one agree unless one overflows.
        ones = np.resize(ones_per_field(self.bits), words.shape[1])
        added = unpack_words(words + ones, self.bits, rows, axis=1)
        if self.bits != 3:
            return added
        # A field of three bits may lie in two words, and no carry gets from one to the other: whether the file was
        # packed field by field or subtracted word by word then shows in the numbers, or not at all.
        alone = (stored + np.uint8(1)) & np.uint8(7)
        if self.symmetric:
            middle = np.uint8(4)
            if bool(((alone == middle) | (added == middle)).all()):
                return np.full_like(stored, middle)
        elif np.array_equal(alone, added):
            return added
        raise SourceError(
            f"{self.qzeros.name}: zero points of 3 bits in the layout 'gptq' cannot be told apart where they lie in "
            "two words; save the checkpoint in the layout 'gptq_v2'"
        )
