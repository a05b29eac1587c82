"""Packed checkpoints decoded number by number in float64, as the papers and formats describe them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

Floats = NDArray[np.float64]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def field(words: NDArray[Any], place: int, bits: int) -> int:
    """Integer number `place` of a row of 32-bit words that are one stream of bits, the lowest first."""
    value = 0
    for bit in range(bits):
        word, shift = divmod(place * bits + bit, 32)
        value |= (int(words[word]) >> shift & 1) << bit
    return value


def awq(found: dict[str, torch.Tensor], module: str, group: int) -> Floats:
    """`weight[n, k] = (q - z) * s`; channel `8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]` is nibble i of word c."""
    qweight, qzeros = found[f"{module}.qweight"].numpy(), found[f"{module}.qzeros"].numpy()
    scales = found[f"{module}.scales"]
    assert (qweight.dtype, qzeros.dtype, scales.dtype) == (np.int32, np.int32, torch.float16)
    channels, outputs = qweight.shape[0], qweight.shape[1] * 8
    weight = np.zeros((outputs, channels))
    for n in range(outputs):
        word, nibble = n // 8, [0, 2, 4, 6, 1, 3, 5, 7].index(n % 8)
        for k in range(channels):
            q = int(qweight[k, word]) >> (4 * nibble) & 15
            z = int(qzeros[k // group, word]) >> (4 * nibble) & 15
            weight[n, k] = (q - z) * float(scales[k // group, n])
    return weight


def gptq(found: dict[str, torch.Tensor], module: str, bits: int, *, first: bool) -> Floats:
    """`weight[n, k] = (q - z) * s` with the group of k from g_idx; version one stores z - 1."""
    qweight, qzeros = found[f"{module}.qweight"].numpy(), found[f"{module}.qzeros"].numpy()
    scales, g_idx = found[f"{module}.scales"], found[f"{module}.g_idx"].numpy()
    assert (qweight.dtype, g_idx.dtype, scales.dtype) == (np.int32, np.int32, torch.float16)
    outputs = qweight.shape[1]
    weight = np.zeros((outputs, len(g_idx)))
    for n in range(outputs):
        points = [field(row, n, bits) + int(first) for row in qzeros]
        for k, group in enumerate(g_idx):
            weight[n, k] = (field(qweight[:, n], k, bits) - points[group]) * float(scales[group, n])
    return weight


def pack_quantized(found: dict[str, torch.Tensor], module: str, bits: int) -> Floats:
    """`weight[n, k] = (q - z) * s`; integers are offset by half the range, zero points packed along the outputs."""
    packed, scales = found[f"{module}.weight_packed"].numpy(), found[f"{module}.weight_scale"]
    rows, channels = found[f"{module}.weight_shape"].tolist()
    points = found.get(f"{module}.weight_zero_point")
    groups = scales.shape[1]
    half = 1 << (bits - 1)
    weight = np.zeros((rows, channels))
    for n in range(rows):
        zeros = [0 if points is None else field(points.numpy()[:, g], n, bits) - half for g in range(groups)]
        for k in range(channels):
            group = k // (channels // groups)
            weight[n, k] = (field(packed[n], k, bits) - half - zeros[group]) * float(scales[n, group])
    return weight


def scaled(found: dict[str, torch.Tensor], module: str) -> Floats:
    """`weight[n, k] = q * s` for INT8 and for FP8."""
    values, scales = found[f"{module}.weight"].double().numpy(), found[f"{module}.weight_scale"].double().numpy()
    return np.asarray(values * np.repeat(scales, values.shape[1] // scales.shape[1], axis=1))


_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def float4(found: dict[str, torch.Tensor], module: str) -> Floats:
    """`weight[n, k] = e2m1(code) * s`: s is a power of two for mxfp4, divided by the global scale for nvfp4."""
    packed, scales = found[f"{module}.weight_packed"].numpy(), found[f"{module}.weight_scale"]
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    values = np.array([(-1.0 if code & 8 else 1.0) * _E2M1[code & 7] for code in range(16)])[codes]
    if scales.dtype == torch.uint8:
        factors = 2.0 ** (scales.double().numpy() - 127)
    else:
        factors = scales.double().numpy() / float(found[f"{module}.weight_global_scale"])
    return np.asarray(values * np.repeat(factors, values.shape[1] // factors.shape[1], axis=1))
