"""Linear layers: dispatch on what the weight is, and how its product is launched.

Plain weights go to torch's matrix product (cuBLAS, hipBLASLt). Quantized ones go to kernels/quantized_linear.py, in a
configuration that was measured on the device (`tune_linear`), or the default for its kind of chip (linear_tiles.py).
Tiles of tokens run in bands of 8, which share the weight through the cache.

A product is the same whatever the configuration, up to the order of its sums; with a given configuration it is the same
every time: parts are added in order, by a kernel of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.triton.kernels.chips import device_target, is_nvidia, processors
from inferencex.runtime.backends.triton.kernels.dequantize import chip, folded_factor
from inferencex.runtime.backends.triton.kernels.linear_tiles import (
    KERNEL,
    TRITON_TYPES,
    Scaling,
    Shape,
    candidates,
    configuration_of,
    default_config,
)
from inferencex.runtime.backends.triton.kernels.quantized_linear import add_splits_kernel, quantized_linear_kernel
from inferencex.runtime.backends.triton.kernels.variant import TARGETS, KernelVariant, Target
from inferencex.runtime.backends.triton.tuning import Config, Tuner, bucket_of
from inferencex.runtime.backends.triton.weights import Format, LinearWeight
from inferencex.runtime.backends.triton.weights.layout import panel_of

_BAND = 8
_SUM_BLOCK = 1024


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
        config = configuration_of(shape, bucket_of(x.shape[0]), x.device)
        launch(x if x.stride(1) == 1 else x.contiguous(), weight, out, shape, config)
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
    factor = weight.tensor_scale
    if scaling == "before":
        factor *= folded_factor(weight.format, weight.scale_format, x.dtype)
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
        factor,
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
        add_splits_kernel[(tokens, triton.cdiv(shape.rows, _SUM_BLOCK))](
            parts,
            weight.bias,
            out,
            factor,
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


def tune_linear(tuner: Tuner, weight: LinearWeight, dtype: torch.dtype, tokens: Sequence[int]) -> None:
    """Measure products of `weight` with each number of tokens where it lies."""
    if weight.format == "plain" or weight.layout != "panels":
        raise BackendError(f"{weight.format} weights in {weight.layout} have no configurations to choose from")
    shape, device = Shape.of(weight, dtype), weight.values.device
    for count in dict.fromkeys(map(bucket_of, tokens)):
        x = torch.randn((count, shape.features), device=device).to(dtype)
        out = torch.empty((count, shape.rows), dtype=dtype, device=x.device)
        name = shape.class_for(count)
        options = candidates(shape, count, device_target(device), processors(device))
        tuner.tune(
            KERNEL,
            name,
            options,
            lambda config, x=x, out=out: launch(x, weight, out, shape, config),  # type: ignore[misc]
        )


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
    ("e2m1", 16, True, "e5m3", (torch.bfloat16, torch.float16), (1, 4096)),
    ("e2m1", 32, True, "e8m0", (torch.bfloat16, torch.float16), (1, 4096)),
)
"""Compiled ahead of time: format, group, symmetry, scales, activations, tokens."""


def variants() -> list[KernelVariant]:
    """Return products in their default configurations on a 4096 x 4096 weight, and the sum of split features."""
    found: dict[tuple[object, ...], tuple[KernelVariant, set[Target]]] = {}
    for format, group, is_symmetric, scales, dtypes, token_counts in _SCHEMES:
        for dtype in dtypes:
            shape = _square(format, group, is_symmetric, dtype)
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


def _square(format: Format, group: int, is_symmetric: bool, dtype: torch.dtype) -> Shape:
    """Return the shape of a weight of 4096 x 4096."""
    slices = 4 if format in ("int4", "e2m1") else 2
    panel = 128 if format == "e2m1" else panel_of(16 // slices, group or 4096, 4096)
    return Shape(format, dtype, 4096, 4096, group, panel, panel // slices, is_symmetric)


def decode_variant(format: Format, group: int, is_symmetric: bool, scales: str) -> tuple[KernelVariant, Config, int]:
    """Return the product of one token with a 4096 x 4096 weight on sm_90, its configuration, and features of a turn."""
    shape = _square(format, group, is_symmetric, torch.bfloat16)
    config = default_config(shape, 1, "sm_90", 132)
    return _variant(shape, 1, scales, config, "sm_90"), config, shape.panel


def _variant(shape: Shape, tokens: int, scales: str, config: Config, target: Target) -> KernelVariant:
    dtype, is_split = TRITON_TYPES[shape.dtype], config["SPLITS"] > 1
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
        "CHIP": "cuda" if is_nvidia(target) else "hip",
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
        f"add_splits {TRITON_TYPES[dtype]}",
        {
            "parts_ptr": "*fp32",
            "y_ptr": f"*{TRITON_TYPES[dtype]}",
            "tensor_scale": "fp32",
            **dict.fromkeys(("T", "N", "y_stride"), "i32"),
        },
        {"bias_ptr": None, "SPLITS": 8, "BLOCK": _SUM_BLOCK},
        aligned=("parts_ptr", "y_ptr", "N", "y_stride"),
    )
