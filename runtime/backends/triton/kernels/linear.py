"""Linear layers: dispatch on what the weight is, and how its product is launched.

Plain weights go to torch's matrix product (cuBLAS, hipBLASLt). Quantized ones go to kernels/quantized_linear.py, in a
configuration that was measured on the device (`tune_linear`), or the default for its kind of chip, below.

The space that is searched, for a number of tokens T rounded up to a power of two:

    BLOCK_N  rows of a tile      32, 64, 128; from 65 tokens on 64, 128, 256
    BLOCK_T  tokens of a tile    8 (CUDA) or 16 for few; T, up to 128; 256 on sm_90 from 256 tokens on
    SPLITS   parts of K          1, 2, 4, 8, 16, as long as each has two panels and there are fewer than 16 programs
                                 for a multiprocessor
    BAND     tiles of tokens that share the weight through the cache: 8
    warps    4; also 2 for 32 rows, 8 from 64 x 128 on; stages 2 to 5 (CUDA), 1 or 2 (AMD)

A product is the same whatever the configuration, up to the order of its sums; with a given configuration it is the same
every time: parts are added in order, by a kernel of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.triton.kernels.dequantize import chip
from inferencex.runtime.backends.triton.kernels.quantized_linear import add_splits_kernel, quantized_linear_kernel
from inferencex.runtime.backends.triton.kernels.variant import TARGETS, KernelVariant, Target
from inferencex.runtime.backends.triton.tuning import Config, Tuner, bucket_of, configuration
from inferencex.runtime.backends.triton.weights import Format, LinearWeight
from inferencex.runtime.backends.triton.weights.layout import panel_of

Scaling = Literal["channel", "after", "before", "elements"]
"""Where scales are applied (kernels/quantized_linear.py)."""

KERNEL = "quantized_linear"
"""The name under which configurations are kept."""

_BAND = 8
_SUM_BLOCK = 1024
_FEW = 16
"""Tokens up to which the weight's bytes are the cost, whatever the tile."""

_TRITON_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "u8"}


@dataclass(frozen=True)
class Shape:
    """What decides how a quantized product is launched; one of these is a shape class, but for the bucket of T.

    group is 0 for one scale a row; panels and slice are those of the weight's layout.
    """

    format: Format
    dtype: torch.dtype
    rows: int
    features: int
    group: int
    panel: int
    slice: int
    is_symmetric: bool

    @classmethod
    def of(cls, weight: LinearWeight, dtype: torch.dtype) -> Shape:
        """Return the shape of products with `weight`."""
        return cls(
            weight.format,
            dtype,
            weight.out_features,
            weight.in_features,
            0 if weight.is_per_channel else weight.group_size,
            weight.panel,
            weight.slice_features,
            weight.zero_points is None,
        )

    @property
    def panels(self) -> int:
        """Panels of the weight."""
        return -(-self.features // self.panel)

    def class_for(self, tokens: int) -> str:
        """Return the name of the shape class."""
        scheme = f"{self.format} g{self.group}{'' if self.is_symmetric else ' z'} {_TRITON_TYPES[self.dtype]}"
        return f"{scheme} N{self.rows} K{self.features} T{bucket_of(tokens)}"

    def scaling(self, tokens: int) -> Scaling:
        """Return where scales are applied for a number of tokens."""
        if self.group == 0:
            return "channel"
        whole_slices, whole_groups = self.group % self.slice == 0, self.slice % self.group == 0
        if not whole_slices and not (whole_groups and self.format == "e2m1"):
            return "elements"
        if self.group % self.panel == 0 or (whole_slices and self.format != "e2m1" and tokens <= 2 * _FEW):
            return "after"
        return "after" if self.dtype == torch.float32 and whole_slices else "before"


def linear(x: Tensor, weight: LinearWeight, *, out: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, `[T, N]` in the type of `x`; sums are float32.

    x:   `[T, K]`, float16, bfloat16 or float32; a row's elements side by side
    out: where the result goes

    Raises BackendError for shapes and types that do not fit, and for weights that are not one matrix of floats or of
    numbers in panels.
    """
    rows, features = weight.shape[-2:]
    if x.dim() != 2 or x.shape[1] != features or len(weight.shape) != 2:
        raise BackendError(f"a linear layer {list(weight.shape)} got activations {list(x.shape)}")
    if out is not None and (tuple(out.shape) != (x.shape[0], rows) or out.dtype != x.dtype or out.stride(1) != 1):
        raise BackendError(
            f"the result of a linear layer is {list(out.shape)} of {out.dtype}, expected [{x.shape[0]}, {rows}] of "
            f"{x.dtype} with rows in one piece"
        )
    if weight.format == "plain":
        return _plain(x, weight, out)
    if weight.layout != "panels" or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise BackendError(
            f"{weight.format} weights {list(weight.shape)} in {weight.layout} are not multiplied with {x.dtype}"
        )
    if out is None:
        out = torch.empty((x.shape[0], rows), dtype=x.dtype, device=x.device)
    if x.shape[0] > 0:
        shape = Shape.of(weight, x.dtype)
        launch(x if x.stride(1) == 1 else x.contiguous(), weight, out, shape, _config(shape, bucket_of(x.shape[0])))
    return out


def _plain(x: Tensor, weight: LinearWeight, out: Tensor | None) -> Tensor:
    if x.dtype != weight.values.dtype:
        raise BackendError(f"weights of {weight.values.dtype} are not multiplied with {x.dtype}")
    if out is None:
        return torch.nn.functional.linear(x, weight.values, weight.bias)
    if weight.bias is None:
        return torch.mm(x, weight.values.T, out=out)
    return torch.addmm(weight.bias, x, weight.values.T, out=out)


def launch(x: Tensor, weight: LinearWeight, out: Tensor, shape: Shape, config: Config) -> None:
    """Multiply with quantized weights in a configuration; `linear` has checked what must fit."""
    tokens, splits = x.shape[0], config["SPLITS"]
    scaling = shape.scaling(tokens)
    assert weight.scales is not None, "quantized weights have scales"
    parts = out
    if splits > 1:
        parts = torch.empty((splits, tokens, shape.rows), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(shape.rows, config["BLOCK_N"]) * triton.cdiv(tokens, config["BLOCK_T"])
    quantized_linear_kernel[(tiles, splits)](
        x,
        weight.values,
        weight.scales,
        weight.zero_points,
        weight.bias,
        parts,
        weight.tensor_scale,
        tokens,
        shape.rows,
        shape.features,
        x.stride(0),
        parts.stride(-2),
        shape.panels,
        SCALES=weight.scale_format,
        **_constants(shape, scaling),
        **config.constants,
        BAND=_BAND,
        CHIP=chip(),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits > 1:
        add_splits_kernel[(triton.cdiv(shape.rows, _SUM_BLOCK), tokens)](
            parts,
            weight.bias,
            out,
            weight.tensor_scale,
            tokens,
            shape.rows,
            out.stride(0),
            SPLITS=splits,
            BLOCK=_SUM_BLOCK,
        )


def _constants(shape: Shape, scaling: Scaling) -> dict[str, int | str | bool]:
    return {
        "FORMAT": shape.format,
        "SCALING": scaling,
        "PANEL": shape.panel,
        "GROUP": max(shape.group, 1),
        "EVEN_K": shape.features % shape.panel == 0,
    }


@functools.cache
def _config(shape: Shape, bucket: int) -> Config:
    """Return the configuration for a bucket of tokens; cached, for launches are many."""
    if chip() == "interpreter":
        return _interpreted(shape, bucket)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    default = default_config(shape, bucket, _target(), properties.multi_processor_count)
    return configuration(KERNEL, shape.class_for(bucket), default)


def _target() -> Target:
    """Return the chip among `TARGETS` whose defaults suit the current device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip is not None:
        return "gfx942" if getattr(properties, "gcnArchName", "").startswith("gfx9") else "gfx1100"
    return "sm_90" if properties.major == 9 else "sm_80"


def _interpreted(shape: Shape, tokens: int) -> Config:
    """Return large tiles: numpy computes one at a time."""
    wide = min(1 << (shape.rows - 1).bit_length(), 512)
    return Config.of(4, 1, BLOCK_N=max(wide, 16), BLOCK_T=min(max(bucket_of(tokens), 16), 256), SPLITS=1)


def default_config(shape: Shape, tokens: int, target: Target, processors: int) -> Config:
    """Return a configuration that works on a kind of chip with a number of multiprocessors, unmeasured.

    Tiles are those that spill no registers (tests compile them); parts of K are as many as give every multiprocessor
    four programs for few tokens, one or two for many.
    """
    config = _tile(shape, tokens, target, processors)
    tiles = triton.cdiv(shape.rows, config["BLOCK_N"]) * triton.cdiv(tokens, config["BLOCK_T"])
    wanted = (4 if tokens <= _FEW else 2 if tokens <= 64 else 1) * processors
    splits = 1
    while splits < 16 and tiles * splits * 2 <= wanted and shape.panels >= splits * 2 * 4:
        splits *= 2
    return Config.of(config.num_warps, config.num_stages, **{**config.constants, "SPLITS": splits})


def _tile(shape: Shape, tokens: int, target: Target, processors: int) -> Config:
    is_cuda = target in ("sm_80", "sm_90")
    if shape.dtype == torch.float32:
        return Config.of(4, 2, BLOCK_N=16 if target == "gfx1100" else 32, BLOCK_T=16, SPLITS=1)
    if shape.scaling(tokens) == "elements":  # which takes a register for each scale
        return Config.of(4, 3 if is_cuda else 2, BLOCK_N=32, BLOCK_T=16, SPLITS=1)
    if tokens <= _FEW:
        block_n = 128 if shape.rows >= 64 * processors else 64
        return Config.of(
            4, 4 if is_cuda else 2, BLOCK_N=block_n, BLOCK_T=8 if tokens <= 8 and is_cuda else 16, SPLITS=1
        )
    if target == "gfx1100":
        return Config.of(4, 2, BLOCK_N=64, BLOCK_T=32, SPLITS=1)
    if tokens <= 64:
        return Config.of(4, 3 if is_cuda else 2, BLOCK_N=64, BLOCK_T=32 if tokens <= 32 else 64, SPLITS=1)
    return Config.of(8, 3 if is_cuda else 2, BLOCK_N=128, BLOCK_T=64 if target == "sm_80" else 128, SPLITS=1)


def candidates(shape: Shape, tokens: int, target: Target, processors: int) -> list[Config]:
    """Return the configurations that are worth measuring, the default first."""
    default = default_config(shape, tokens, target, processors)
    if shape.dtype == torch.float32:
        return [default]
    is_cuda = target in ("sm_80", "sm_90")
    blocks_t = [8 if is_cuda and tokens <= 8 else 16] if tokens <= _FEW else [min(bucket_of(tokens), 128)]
    if tokens > 64:
        blocks_t.append(64)
    if tokens >= 256 and target == "sm_90":
        blocks_t.append(256)
    found = [default]
    for block_t in blocks_t:
        for block_n in (32, 64, 128) if tokens <= 64 else (64, 128, 256):
            if block_n * block_t > 128 * 256:
                continue
            tiles = triton.cdiv(shape.rows, block_n) * triton.cdiv(tokens, block_t)
            for splits in (1, 2, 4, 8, 16):
                if splits > 1 and (shape.panels < 2 * splits or tiles * splits > 16 * processors):
                    continue
                for warps in (2, 4) if block_n == 32 else (4, 8) if block_n * block_t >= 64 * 128 else (4,):
                    for stages in (2, 3, 4, 5) if is_cuda else (1, 2):
                        found.append(Config.of(warps, stages, BLOCK_N=block_n, BLOCK_T=block_t, SPLITS=splits))
    return list(dict.fromkeys(found))


def tune_linear(tuner: Tuner, weight: LinearWeight, dtype: torch.dtype, tokens: Sequence[int]) -> dict[str, Config]:
    """Measure products of `weight` with each number of tokens on the current GPU; return what was chosen by class."""
    if weight.format == "plain" or weight.layout != "panels":
        raise BackendError(f"{weight.format} weights in {weight.layout} have no configurations to choose from")
    shape, target = Shape.of(weight, dtype), _target()
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    chosen = {}
    for count in dict.fromkeys(map(bucket_of, tokens)):
        x = torch.randn((count, shape.features), device=weight.values.device).to(dtype)
        out = torch.empty((count, shape.rows), dtype=dtype, device=x.device)
        name = shape.class_for(count)
        options = candidates(shape, count, target, processors)
        chosen[name] = tuner.tune(
            KERNEL,
            name,
            options,
            lambda config, x=x, out=out: launch(x, weight, out, shape, config),  # type: ignore[misc]
        )
    _config.cache_clear()
    return chosen


_ANY_TOKENS = (1, 16, 64, 4096)
_SCHEMES: tuple[tuple[Format, int, bool, str, tuple[torch.dtype, ...], tuple[int, ...]], ...] = (
    ("int4", 128, False, "float", (torch.bfloat16, torch.float16), _ANY_TOKENS),
    ("int4", 128, True, "float", (torch.bfloat16, torch.float32), (1, 4096)),
    ("int4", 32, False, "float", (torch.bfloat16,), _ANY_TOKENS),
    ("int4", 0, False, "float", (torch.bfloat16,), (1, 4096)),
    ("int4", 24, False, "float", (torch.bfloat16,), (1, 4096)),
    ("int8", 0, True, "float", (torch.bfloat16, torch.float16), (1, 4096)),
    ("int8", 32, False, "float", (torch.bfloat16,), (1, 4096)),
    ("e4m3", 128, True, "float", (torch.bfloat16,), (1, 4096)),
    ("e2m1", 16, True, "e4m3", (torch.bfloat16, torch.float16), (1, 4096)),
    ("e2m1", 32, True, "e8m0", (torch.bfloat16,), (1, 4096)),
)
"""Compiled ahead of time: format, group, symmetry, scales, activations, tokens."""


def variants() -> list[KernelVariant]:
    """Return products in their default configurations on a 4096 x 4096 weight, and the sum of split features."""
    found: dict[tuple[object, ...], tuple[KernelVariant, set[Target]]] = {}
    for format, group, is_symmetric, scales, dtypes, token_counts in _SCHEMES:
        slices = 4 if format in ("int4", "e2m1") else 2
        panel = 128 if format == "e2m1" else panel_of(16 // slices, group or 4096, 4096)
        for dtype in dtypes:
            shape = Shape(format, dtype, 4096, 4096, group, panel, panel // slices, is_symmetric)
            for tokens in token_counts:
                for target in TARGETS:
                    config = default_config(shape, tokens, target, 132)
                    variant = _variant(shape, tokens, scales, config, target)
                    key = (variant.name, variant.constants["CHIP"], config)
                    found.setdefault(key, (variant, set()))[1].add(target)
    products = [
        replace(variant, targets=tuple(target for target in TARGETS if target in targets))
        for variant, targets in found.values()
    ]
    return [*products, *(_sum_variant(dtype) for dtype in (torch.bfloat16, torch.float16))]


def _variant(shape: Shape, tokens: int, scales: str, config: Config, target: Target) -> KernelVariant:
    dtype, is_split = _TRITON_TYPES[shape.dtype], config["SPLITS"] > 1
    scaling = shape.scaling(tokens)
    signature = {
        "x_ptr": f"*{dtype}",
        "words_ptr": "*i16",
        "scales_ptr": "*fp16" if scales == "float" else "*u8",
        "y_ptr": "*fp32" if is_split else f"*{dtype}",
        "tensor_scale": "fp32",
        **dict.fromkeys(("T", "N", "K", "x_stride", "y_stride", "panels"), "i32"),
    }
    if not shape.is_symmetric:
        signature["zeros_ptr"] = "*u8"
    constants = {
        **({"zeros_ptr": None} if shape.is_symmetric else {}),
        "bias_ptr": None,
        "SCALES": scales,
        **_constants(shape, scaling),
        **config.constants,
        "BAND": _BAND,
        "CHIP": "cuda" if target in ("sm_80", "sm_90") else "hip",
        "STAGES": config.num_stages,
    }
    tile = f"{config['BLOCK_N']}x{config['BLOCK_T']}" + (f"/{config['SPLITS']}" if is_split else "")
    scheme = shape.class_for(tokens).split(" N")[0].replace(" ", "-")
    return KernelVariant(
        quantized_linear_kernel,
        f"quantized_linear {scheme} {scaling} {tile}",
        signature,
        constants,
        config.num_warps,
        config.num_stages,
        aligned=tuple(name for name in signature if name not in ("tensor_scale", "T", "panels")),
    )


def _sum_variant(dtype: torch.dtype) -> KernelVariant:
    return KernelVariant(
        add_splits_kernel,
        f"add_splits {_TRITON_TYPES[dtype]}",
        {
            "parts_ptr": "*fp32",
            "y_ptr": f"*{_TRITON_TYPES[dtype]}",
            "tensor_scale": "fp32",
            **dict.fromkeys(("T", "N", "y_stride"), "i32"),
        },
        {"bias_ptr": None, "SPLITS": 8, "BLOCK": _SUM_BLOCK},
        aligned=("parts_ptr", "y_ptr", "N", "y_stride"),
    )
