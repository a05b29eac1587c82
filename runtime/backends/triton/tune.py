"""Measure launch options of what a bundle launches, on the GPU that is here, and keep the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from inferencex.formats.bundle import Bundle
from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.errors import BackendError
from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.backends.device_names import DeviceName
from inferencex.runtime.backends.graph.static_values import StaticValues
from inferencex.runtime.backends.triton.backend import Plan, plan_of
from inferencex.runtime.backends.triton.devices import choose_device
from inferencex.runtime.backends.triton.executable import on_device
from inferencex.runtime.backends.triton.kernels.attention_step import AttentionLayer, HeadShape
from inferencex.runtime.backends.triton.kernels.attention_tuning import tune_attention
from inferencex.runtime.backends.triton.kernels.grouped_linear import tune_grouped_linear
from inferencex.runtime.backends.triton.kernels.linear import tune_linear
from inferencex.runtime.backends.triton.kernels.scaled_linear import tune_scaled_linear
from inferencex.runtime.backends.triton.lowering.constants import Constants
from inferencex.runtime.backends.triton.lowering.context import input_of
from inferencex.runtime.backends.triton.lowering.linear import linear_of
from inferencex.runtime.backends.triton.lowering.rows import expert_stacks
from inferencex.runtime.backends.triton.tuning import Config, Tuner
from inferencex.runtime.backends.triton.tuning.cache import INTERPRETER, cache_path, device_name

DEFAULT_TOKENS = (1, 8, 16, 32, 64, 256, 1024)
"""Tokens in a step: a few sizes of decode batches, and that of the largest step where nobody asks for another."""


@dataclass(frozen=True)
class Tuned:
    """What was chosen for a kernel on a class of shapes."""

    kernel: str
    shape_class: str
    config: Config


def tune_bundle(
    bundle: Path,
    options: BackendOptions | None = None,
    tokens: Sequence[int] = DEFAULT_TOKENS,
    *,
    again: bool = False,
    tuner: Tuner | None = None,
) -> Iterator[Tuned]:
    """Yield what is chosen for each class of shapes that a bundle launches, as it is measured and written to the cache.

    options: as the bundle will be run: the device, the types of activations and of the KV cache, the longest sequence
    tokens:  in a step, that linears are measured with
    again:   measure classes that are in the cache already, too
    tuner:   what measures, instead of the GPU's clock

    A class that the bundle has several times comes once. Raises BackendError without a GPU unless a tuner is given, and
    what compiling the bundle does.
    """
    options = BackendOptions() if options is None else options
    device = choose_device(DeviceName.parse(options.device))
    if device.kind == "interpreter" and tuner is None:
        raise BackendError("nothing can be measured in Triton's interpreter; tuning needs a GPU")
    with on_device(device.torch_device):  # kernels are launched on the current device
        opened = Bundle.open(bundle)
        plan = plan_of(opened, options, device)
        constants = Constants(StaticValues(opened.graph, opened.tensor), device.torch_device, plan.dtype)
        measuring, yielded = Tuner(again=again) if tuner is None else tuner, 0
        for _ in _measured(opened, constants, plan, options, tokens, measuring):
            chosen = list(measuring.chosen.items())
            yield from (Tuned(*key, config) for key, config in chosen[yielded:])
            yielded = len(chosen)


def tuning_path(device: str = "auto") -> Path:
    """Return the file that a device's choices are kept in."""
    chosen = choose_device(DeviceName.parse(device))
    return cache_path(INTERPRETER if chosen.kind == "interpreter" else device_name(chosen.index))


def _measured(
    bundle: Bundle,
    constants: Constants,
    plan: Plan,
    options: BackendOptions,
    tokens: Sequence[int],
    tuner: Tuner,
) -> Iterator[None]:
    """Measure linears, experts and attention, yielding after each; of weights, one is on the device at a time."""
    for node in _of_different_weights(bundle, constants.static):
        linear = linear_of(constants.static, node)
        if linear is None:
            for stack, _ in expert_stacks(node):
                tune_grouped_linear(tuner, constants.linear(stack, None), plan.dtype)
                constants.forget(stack)
                yield
        else:
            weight = constants.linear(linear.weight, None, linear.layout)
            tune = tune_linear if linear.explicit is None else tune_scaled_linear
            tune(tuner, weight, plan.dtype, tokens)
            del weight
            constants.forget(linear.weight)
            yield
    for shape, layer in _layers(bundle, plan, constants.device).items():
        tune_attention(tuner, shape, layer, constants.device, block_size=options.block_size, longest=plan.max_model_len)
        yield


def _of_different_weights(bundle: Bundle, static: StaticValues) -> Iterator[Node]:
    """Yield linears and layers of experts, one for each kind and shape of weights; not those that torch multiplies."""
    seen: set[object] = set()
    for node in bundle.graph:
        linear = linear_of(static, node)
        values = [stack for stack, _ in expert_stacks(node)] if linear is None else [linear.weight]
        if not values or any(value not in static for value in values):
            continue
        kinds = [_kind(static, value) for value in values]
        if linear is not None and kinds == [None]:
            continue
        key = (node.op_type, linear is not None and linear.layout, *kinds, *(value.shape for value in values))
        if key not in seen:
            seen.add(key)
            yield node


def _kind(static: StaticValues, value: Value) -> object:
    """Return what sets a quantized weight apart; None for floats."""
    stored = static.weight(value)
    if stored is None or stored.scales is None:
        return None
    return stored.format, stored.shape, stored.group, stored.zero_points is None, stored.is_signed


def _layers(bundle: Bundle, plan: Plan, device: torch.device) -> dict[HeadShape, AttentionLayer]:
    """Return a layer of each shape of heads: one that sees the whole context, if any does."""
    nodes = [node for node in bundle.graph if (node.domain, node.op_type) == (DOMAIN, "Attention")]
    found: dict[HeadShape, AttentionLayer] = {}
    for node in sorted(nodes, key=lambda node: any(node.attributes.get_int(name, 0) for name in ("window", "chunk"))):
        attributes, layer = node.attributes, plan.layers[node.attributes.get_int("layer")]
        heads = attributes.get_int("num_heads")
        shape = HeadShape(
            heads, layer.num_kv_heads, layer.key_width, layer.value_width, plan.dtype, plan.kv_dtype, plan.kv_scaling
        )
        sinks, slopes = (
            torch.zeros(heads, device=device) if input_of(node, place) is not None else None for place in (3, 4)
        )
        measured = AttentionLayer(
            heads,
            attributes.get_float("scale"),
            attributes.get_int("window", 0),
            attributes.get_int("chunk", 0),
            attributes.get_float("softcap", 0.0),
            sinks,
            slopes,
        )
        found.setdefault(shape, measured)
    return found
