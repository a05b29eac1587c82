"""Instantiate a transformers causal language model without memory for its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import transformers
from accelerate import init_empty_weights
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from inferencex.convert.capture import routes
from inferencex.formats.errors import CaptureError


def empty_model(
    config: transformers.PreTrainedConfig, *, trust_remote_code: bool = False
) -> transformers.PreTrainedModel:
    """Build the model of `config` on the meta device, in float32, with its attention and experts routed.

    Buffers hold their real values: frequencies of rotary embeddings are constants of the graph. Raises CaptureError
    with the reason when transformers cannot build the model.
    """
    ALL_ATTENTION_FUNCTIONS.register(routes.NAME, routes.attention_route)
    ALL_MASK_ATTENTION_FUNCTIONS.register(routes.NAME, routes.mask_route)
    ALL_EXPERTS_FUNCTIONS.register(routes.NAME, routes.experts_route)
    try:
        try:
            model = _build(config, routes.NAME, trust_remote_code)
        except KeyError as error:
            if error.args != (routes.NAME,):
                raise
            model = _build(config, "eager", trust_remote_code)  # it looks its attention up in a table of its own
    except (ValueError, TypeError, AttributeError, KeyError, ImportError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(
            f"transformers cannot build a causal language model of type {config.model_type!r}: {first}"
        ) from error
    model.tie_weights()
    return torch.nn.Module.eval(model)  # the class's own has no types


def _build(
    config: transformers.PreTrainedConfig, attention: str, trust_remote_code: bool
) -> transformers.PreTrainedModel:
    build: Callable[..., transformers.PreTrainedModel] = transformers.AutoModelForCausalLM.from_config
    config = copy.deepcopy(config)  # transformers writes the names of the implementations into it
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.use_cache = False
    with init_empty_weights(include_buffers=False):
        return build(
            config,
            attn_implementation=attention,
            experts_implementation=routes.NAME,
            trust_remote_code=trust_remote_code,
            dtype=torch.float32,
        )


def with_fake_parameters(model: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Replace the meta parameters of `model`, in place, by fake CPU tensors of `mode`; tied ones stay tied."""
    replaced: dict[int, torch.nn.Parameter] = {}
    with mode:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                key = id(parameter)
                if key not in replaced:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                    replaced[key] = torch.nn.Parameter(fake, requires_grad=False)
                module._parameters[name] = replaced[key]
