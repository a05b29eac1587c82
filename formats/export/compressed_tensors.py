"""compressed-tensors, which vLLM and llm-compressor use: weights as packed integers, as INT8, and as floats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from inferencex.formats.bundle import Bundle
from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import ExportError
from inferencex.formats.export.activations import Activation, activation_of
from inferencex.formats.export.checkpoint import CheckpointWriter
from inferencex.formats.export.linears import check_groups, group_size_of, pack_words, plan_linears
from inferencex.formats.export.parameters import grouped_scales, parameters_of, unsigned
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor

NAME = "compressed-tensors"
PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"


@dataclass(frozen=True)
class _Scheme:
    """Weights that agree in this share an entry of `config_groups`."""

    format: str
    bits: int
    group_size: int
    symmetric: bool
    dtype: DataType | None
    is_static: bool


def write(bundle: Bundle, folder: Path) -> list[str]:
    """Write the checkpoint into `folder` and return what a user should know of it.

    With N output and K input features:

    pack-quantized:   `weight_packed` int32 `[N, ceil(K * bits / 32)]`, offset by half the range, `weight_scale`
                      `[N, groups]`, `weight_shape` int64 `[2]`; asymmetric: `weight_zero_point` int32
                      `[ceil(N * bits / 32), groups]`
    int-quantized:    INT8 per channel where activations are quantized too: `weight` int8, `weight_scale` `[N, 1]`
    float-quantized:  `weight` float8_e4m3fn, `weight_scale` `[N, groups]`
    nvfp4-, mxfp4-:   `weight_packed` uint8 `[N, K / 2]`, `weight_scale` float8_e4m3fn or uint8 `[N, groups]`; nvfp4:
                      `weight_global_scale` float32 `[1]`, by which scales are divided

    Activations quantized with one scale have it in `input_scale` float32 `[1]`. Raises ExportError for ragged groups.
    """
    writer = CheckpointWriter(bundle, folder)
    plan = plan_linears(parameters_of(bundle), NAME, head=True)
    schemes: dict[_Scheme, list[str]] = {}
    for parameter in plan.quantized:
        tensor, activation = parameter.quantized(), activation_of(parameter)
        check_groups(parameter.name, tensor, NAME)
        scheme = _scheme(parameter.name, tensor, activation)
        schemes.setdefault(scheme, []).append(parameter.module)
        _add(writer, parameter.module, tensor, scheme)
        if activation is not None and activation.scale is not None:
            writer.add(f"{parameter.module}.input_scale", np.array([activation.scale], dtype=np.float32))
    for parameter in plan.plain:
        writer.add_plain(parameter)
    formats = {scheme.format for scheme in schemes}
    writer.finish(
        {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{place}": _config_group(scheme, ["Linear"] if len(schemes) == 1 else modules)
                for place, (scheme, modules) in enumerate(schemes.items())
            },
            "ignore": plan.excluded,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        },
        {"dtype": "float16", "torch_dtype": "float16"},
    )
    notes = [*plan.notes, "config.json asks for float16, the type of the scales; bfloat16 would round them"]
    if any(scheme.format == NVFP4 for scheme in schemes):
        notes.append("nvfp4 divides by a tensor's scale where the bundle multiplies: scales may differ in the last bit")
    return notes


def _scheme(name: str, tensor: QuantizedTensor, activation: Activation | None) -> _Scheme:
    group_size = group_size_of(tensor)
    if tensor.number == "e2m1":
        chosen, expected = (MXFP4, 32) if tensor.tensor_scale is None else (NVFP4, 16)
        if group_size != expected:
            raise ExportError(f"{name}: has groups of {group_size}; {chosen} has groups of {expected}")
    elif tensor.number == "e4m3":
        chosen = FLOATS
    else:
        whole = tensor.bits == 8 and group_size == PER_CHANNEL and activation is not None
        chosen = INTEGERS if whole else PACKED
    return _Scheme(
        format=chosen,
        bits=tensor.bits,
        group_size=group_size,
        symmetric=tensor.symmetric,
        dtype=None if activation is None else activation.dtype,
        is_static=activation is not None and activation.scale is not None,
    )


def _add(writer: CheckpointWriter, module: str, tensor: QuantizedTensor, scheme: _Scheme) -> None:
    scales = grouped_scales(tensor)
    if scheme.format in (NVFP4, MXFP4):
        rows, channels = tensor.shape
        writer.add(f"{module}.weight_packed", tensor.values.reshape(rows, channels // 2))
        writer.add(f"{module}.weight_scale", scales.view(np.uint8) if scheme.format == MXFP4 else scales)
        if tensor.tensor_scale is not None:
            divisor = np.float32(1) / tensor.tensor_scale
            writer.add(f"{module}.weight_global_scale", np.array([divisor], dtype=np.float32))
        return
    writer.add(f"{module}.weight_scale", scales)
    if scheme.format == FLOATS:
        writer.add(f"{module}.weight", tensor.values.view(ml_dtypes.float8_e4m3fn))
        return
    if scheme.format == INTEGERS:
        writer.add(f"{module}.weight", tensor.integers())
        points = tensor.zero_point_integers()
        if points is not None:
            writer.add(f"{module}.weight_zero_point", points.reshape(tensor.shape[0], -1))
        return
    integers, zero_points = unsigned(tensor)
    writer.add(f"{module}.weight_packed", pack_words(integers, tensor.bits))
    writer.add(f"{module}.weight_shape", np.array(tensor.shape, dtype=np.int64))
    if not tensor.symmetric:
        packed = pack_words(np.ascontiguousarray(zero_points.T), tensor.bits).T
        writer.add(f"{module}.weight_zero_point", packed)


def _config_group(scheme: _Scheme, targets: list[str]) -> dict[str, Any]:
    channel = scheme.group_size == PER_CHANNEL
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.format in (FLOATS, NVFP4, MXFP4) else "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if channel else "tensor_group" if scheme.format == NVFP4 else "group",
        "group_size": None if channel else scheme.group_size,
        "dynamic": False,
    }
    if scheme.format in (NVFP4, MXFP4):
        weights["scale_dtype"] = "torch.float8_e4m3fn" if scheme.format == NVFP4 else "torch.uint8"
    inputs: dict[str, Any] | None = None
    if scheme.dtype is not None:
        inputs = {
            "num_bits": 8,
            "type": "int" if scheme.dtype is DataType.INT8 else "float",
            "symmetric": True,
            "strategy": "tensor" if scheme.is_static else "token",
            "group_size": None,
            "dynamic": not scheme.is_static,
        }
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": scheme.format,
    }
