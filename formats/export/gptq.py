"""GPTQ as AutoGPTQ and GPTQModel store it: integers packed along the input features, zero points minus one (v1)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import ExportError
from inferencex.formats.export.activations import quantizes_activations
from inferencex.formats.export.checkpoint import CheckpointWriter
from inferencex.formats.export.linears import (
    check_groups,
    check_integers,
    float16_scales,
    group_size_of,
    pack_words,
    plan_linears,
)
from inferencex.formats.export.parameters import Parameter, parameters_of, unsigned
from inferencex.formats.packing import QuantizedTensor

NAME = "gptq"


def write(bundle: Bundle, folder: Path) -> list[str]:
    """Write the checkpoint into `folder` and return what a user should know of it.

    Every linear of N output and K input features becomes, with P = 32 / bits, `qweight` int32 `[K / P, N]`, `qzeros`
    int32 `[K / group, N / P]`, `scales` float16 `[K / group, N]` and `g_idx` int32 `[K]`. Zero points are stored minus
    one (v1), unless one of them is 0, which that cannot say: then all are stored as they are (v2).

    Raises ExportError for ragged groups and for features that do not fill words.
    """
    writer = CheckpointWriter(bundle, folder)
    plan = plan_linears(parameters_of(bundle), NAME, head=False)
    formats = {parameter.name: _format(parameter, parameter.quantized()) for parameter in plan.quantized}
    most = max(set(formats.values()), key=lambda entry: (list(formats.values()).count(entry), entry))
    second = any(int(unsigned(parameter.quantized())[1].min()) == 0 for parameter in plan.quantized)
    for parameter in plan.quantized:
        tensor = parameter.quantized()
        integers, zero_points = unsigned(tensor)
        stored_points = zero_points if second else zero_points - np.uint8(1)
        groups = zero_points.shape[1]
        channels = np.arange(tensor.shape[-1], dtype=np.int32)
        writer.add(f"{parameter.module}.qweight", pack_words(integers, tensor.bits).T)
        writer.add(f"{parameter.module}.qzeros", pack_words(np.ascontiguousarray(stored_points.T), tensor.bits))
        writer.add(f"{parameter.module}.scales", float16_scales(parameter.name, tensor, NAME).T)
        writer.add(f"{parameter.module}.g_idx", channels // np.int32(-(-tensor.shape[-1] // groups)))
    for parameter in plan.plain:
        writer.add_plain(parameter)
    bits, group_size, symmetric = most
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": False,
        "true_sequential": True,
        "lm_head": False,
        "checkpoint_format": "gptq_v2" if second else "gptq",
    }
    dynamic = _exceptions({name: entry for name, entry in formats.items() if entry != most})
    dynamic |= {f"-:^{re.escape(module)}$": {} for module in plan.excluded if module != "lm_head"}
    notes = [*plan.notes, "config.json asks for float16, in which the kernels of GPTQ compute"]
    if quantizes_activations(bundle):
        notes.append("the bundle quantizes activations, which gptq does not say: they stay float16")
    if dynamic:
        config["dynamic"] = dynamic
        notes.append("not all linears are quantized alike: only GPTQModel reads the entry `dynamic` that says how")
    if second:
        notes.append("some zero points are 0, which GPTQ v1 cannot say: written as checkpoint_format gptq_v2")
    writer.finish(config, {"dtype": "float16", "torch_dtype": "float16"})
    return notes


def _format(parameter: Parameter, tensor: QuantizedTensor) -> tuple[int, int, bool]:
    """Return bits, group size and symmetry. Raises ExportError for what the format cannot say."""
    check_integers(parameter.name, tensor, NAME)
    check_groups(parameter.name, tensor, NAME)
    in_word = 32 // math.gcd(32, tensor.bits)
    if any(size % in_word for size in tensor.shape):
        raise ExportError(
            f"{parameter.name}: is {list(tensor.shape)}; {NAME} packs multiples of {in_word} features where they have "
            f"{tensor.bits} bits"
        )
    return tensor.bits, group_size_of(tensor), tensor.symmetric


def _exceptions(formats: dict[str, tuple[int, int, bool]]) -> dict[str, dict[str, Any]]:
    """Return GPTQModel's overrides for the modules of weights that differ from most."""
    return {
        f"+:^{re.escape(name.rpartition('.')[0])}$": {"bits": bits, "group_size": group, "sym": symmetric}
        for name, (bits, group, symmetric) in formats.items()
    }
