"""Measure launch options for a bundle's linears on the GPU that is here, and keep the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.device_names import DeviceName
from inferencex.runtime.backends.graph.static_values import StaticValues
from inferencex.runtime.backends.triton.devices import choose_device
from inferencex.runtime.backends.triton.kernels.linear import tune_linear
from inferencex.runtime.backends.triton.lowering.constants import Constants
from inferencex.runtime.backends.triton.tuning import Config, Tuner
from inferencex.runtime.backends.triton.tuning.cache import cache_path, device_name
from inferencex.runtime.backends.triton.weights import LinearWeight

DEFAULT_TOKENS = (1, 8, 16, 32, 64, 256, 2048)
"""Tokens in a step: a few sizes of decode batches, and of prompts."""


@dataclass(frozen=True)
class Tuned:
    """What was chosen for a class of shapes."""

    shape_class: str
    config: Config


def tune_bundle(
    bundle: Path,
    device: str = "auto",
    tokens: Sequence[int] = DEFAULT_TOKENS,
    *,
    tuner: Tuner | None = None,
    tune: Callable[..., dict[str, Config]] = tune_linear,
) -> Iterator[Tuned]:
    """Yield what is chosen for each shape of quantized linear in a bundle, as it is measured and written to the cache.

    `tuner` and `tune` measure; they are given in tests. Raises BackendError without a GPU.
    """
    chosen = choose_device(DeviceName.parse(device))
    if chosen.kind == "interpreter" and tuner is None:
        raise BackendError("nothing can be measured in Triton's interpreter; tuning needs a GPU")
    opened = Bundle.open(bundle)
    constants = Constants(StaticValues(opened.graph, opened.tensor), chosen.torch_device, chosen.compute_dtype)
    if chosen.kind != "interpreter":
        torch.cuda.set_device(chosen.torch_device)  # kernels are launched on the current device
    measured = Tuner() if tuner is None else tuner
    seen = set()
    for weight in _quantized_weights(opened, constants):
        key = (weight.format, weight.shape, weight.group_size, weight.zero_points is None, weight.scale_format)
        if key not in seen:
            seen.add(key)
            for name, config in tune(measured, weight, constants.dtype, tokens).items():
                yield Tuned(name, config)


def tuning_path(device: str = "auto") -> Path:
    """Return the file that a device's choices are kept in."""
    return cache_path(device_name(choose_device(DeviceName.parse(device)).index))


def _quantized_weights(bundle: Bundle, constants: Constants) -> Iterator[LinearWeight]:
    """Yield the weights of linears that are stored in few bits, one at a time on the device."""
    for node in bundle.graph:
        if node.domain != "" or node.op_type != "Gemm" or node.inputs[1] not in constants:
            continue
        value = node.inputs[1]
        assert value is not None
        stored = constants.static.weight(value)
        if stored is not None and stored.scales is not None and len(stored.shape) == 2:
            yield constants.linear(value, None)
            constants.forget(value)
