"""What a kernel is compiled as: the types, constants and launch options of one of its specializations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Target = Literal["sm_80", "sm_90", "gfx942", "gfx1100"]
"""A chip that kernels are compiled for without one at hand: A100, H100 and H200, MI300, RX 7900."""

TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True)
class KernelVariant:
    """A specialization of a kernel, as launches make it.

    kernel:      the function under `@triton.jit`
    name:        how tables call it: the kernel, and what sets this variant apart
    signature:   Triton's type of every argument that is no constant, such as `*bf16`, `i32` or `fp32`
    constants:   the value of every argument that is
    num_warps, num_stages: as launched
    aligned:     arguments that are multiples of 16 (pointers and sizes), as Triton finds out at a launch
    targets:     the chips that it is launched on
    """

    kernel: Any = field(repr=False)
    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    aligned: tuple[str, ...] = ()
    targets: tuple[Target, ...] = TARGETS
