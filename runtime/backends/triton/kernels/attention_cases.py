"""The heads, types and kinds of attention that models have: what the kernels are compiled for ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from inferencex.runtime.backends.triton.kernels.attention_step import Family, constants_of
from inferencex.runtime.backends.triton.kernels.kv_pages import PageFormat, Scaling
from inferencex.runtime.backends.triton.kernels.variant import TARGETS, Target

FAMILIES: dict[Target, Family] = {"sm_80": "ampere", "sm_90": "hopper", "gfx942": "cdna", "gfx1100": "rdna"}


@dataclass(frozen=True)
class AttentionCase:
    """A layer's attention in numbers; `element` and `page` are Triton's names of the types of queries and pages."""

    name: str
    num_heads: int = 32
    num_kv_heads: int = 8
    key_width: int = 128
    value_width: int = 128
    element: str = "bf16"
    page: str = "bf16"
    page_format: PageFormat = "plain"
    scaling: Scaling = "none"
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    targets: tuple[Target, ...] = TARGETS

    @property
    def itemsize(self) -> int:
        """Bytes of an element of queries."""
        return 4 if self.element == "fp32" else 2

    @property
    def page_itemsize(self) -> int:
        """Bytes of an element of pages."""
        return {"fp32": 4, "bf16": 2, "fp16": 2}.get(self.page, 1)

    def constants(self) -> dict[str, object]:
        """Return the constants that the kernels share, and the pointers that are not given."""
        missing = [] if self.scaling != "none" else ["key_scales", "value_scales"]
        missing += [] if self.sinks else ["sinks"]
        missing += [] if self.alibi else ["slopes"]
        return {
            **dict.fromkeys(missing),
            **constants_of(
                self.num_heads,
                self.num_kv_heads,
                self.key_width,
                self.value_width,
                window=self.window,
                chunk=self.chunk,
                softcap=self.softcap,
                sinks=self.sinks,
                alibi=self.alibi,
                page_format=self.page_format,
                scaling=self.scaling,
            ),
        }

    def signature(self, *more: str) -> dict[str, str]:
        """Return the types of the arguments that the kernels share, with `more` pointers to int32."""
        found = {name: f"*{self.element}" for name in ("q", "y")} | {
            name: f"*{self.page}" for name in ("keys", "values")
        }
        found |= {name: "*fp32" for name in ("key_scales", "value_scales") if self.scaling != "none"}
        found |= {name: f"*{self.element}" for name, given in (("sinks", self.sinks), ("slopes", self.alibi)) if given}
        found |= {name: "*i32" for name in (*more, "sequence_offsets", "context_lengths", "block_tables")}
        return found | {"q_stride": "i32", "y_stride": "i32", "table_stride": "i32", "scale": "fp32"}


def attention_cases() -> Iterator[AttentionCase]:
    """Yield every case: each width of heads, type and kind of attention at least once, the most frequent in both types.

    Pages of E4M3 come in two: only sm_90 of the targets has an instruction that reads them.
    """
    int8: dict[str, Any] = {"page": "i8", "page_format": "int8"}
    fp8: dict[str, Any] = {"page": "u8", "scaling": "head"}
    latent = (16, 1, 576, 512)
    by_instruction = {**fp8, "page_format": "fp8", "targets": ("sm_90",)}
    by_arithmetic = {**fp8, "page_format": "fp8_bits", "targets": ("sm_80", "gfx942", "gfx1100")}
    for element in ("bf16", "fp16"):
        yield AttentionCase("heads of 128", element=element, page=element)
        yield AttentionCase("heads of 128, int8 by token", element=element, scaling="token", **int8)
        yield AttentionCase("heads of 128, fp8", element=element, **by_instruction)
        yield AttentionCase("heads of 128, fp8", element=element, **by_arithmetic)
    yield AttentionCase("heads of 128, int8 by head", scaling="head", **int8)
    yield AttentionCase("heads of 128, chunks", 40, 8, chunk=8192)
    yield AttentionCase("heads of 64, window, sinks", 64, 8, 64, 64, window=128, sinks=True)
    yield AttentionCase("heads of 80, slopes", 32, 32, 80, 80, "fp16", "fp16", alibi=True)
    yield AttentionCase("heads of 256, window, softcap", 16, 8, 256, 256, window=4096, softcap=50.0)
    yield AttentionCase("heads of 192/128", 16, 16, 192, 128)
    yield AttentionCase("heads of 576/512", *latent)
    yield AttentionCase("heads of 576/512, fp8", *latent, **by_instruction)
    yield AttentionCase("heads of 576/512, fp8", *latent, **by_arithmetic)
    exact: tuple[Target, ...] = ("sm_80", "sm_90", "gfx942")
    yield AttentionCase("heads of 128", element="fp32", page="fp32", targets=exact)
