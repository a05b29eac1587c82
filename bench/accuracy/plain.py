"""The model in float32 as transformers computes it, and with weights that a tool quantized in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from bench.accuracy.tools.base import Activations, Logits
from inferencex.convert.source.base import TensorHandle
from inferencex.convert.source.mapping import resolve_parameters
from inferencex.convert.source.open import open_checkpoint
from inferencex.convert.source.packed.base import PackedHandle

_LARGEST = {"int8": 127.0, "fp8": 448.0}  # of E4M3
_NOT_COUNTED = (".g_idx", ".weight_g_idx", ".weight_shape")
_load: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_pretrained


def load_model(checkpoint: Path) -> PreTrainedModel:
    """Load a checkpoint in float32."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return _load(checkpoint, dtype=torch.float32)  # in evaluation mode


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return all of a model but its head."""
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    return decoder


def head_of(model: PreTrainedModel) -> nn.Linear:
    """Return what makes logits of the decoder's output."""
    head: nn.Linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head


def decoder_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linears of a model by name, all but the head."""
    head = head_of(model)
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }


def stored_bits(checkpoint: Path, quantized: Path) -> float:
    """Bits a weight of the decoder's linears takes in a quantized checkpoint: a folder, or a GGUF file.

    Counted is all that belongs to a weight but its shape and the order of its input channels (`g_idx`), which formats
    write even where it is none.
    """
    source = open_checkpoint(str(quantized))
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = build(open_checkpoint(str(checkpoint)).config)
    recipes = resolve_parameters(model, source)
    sizes = {part.name: part.nbytes for tensor in source.tensors.values() for part in _parts(tensor)}
    taken = weights = 0
    for name, linear in decoder_linears(model).items():
        parts = recipes[f"{name}.weight"].sources
        taken += sum(sizes[part] for part in parts if not part.endswith(_NOT_COUNTED))
        weights += linear.weight.numel()
    return 8 * taken / weights


def _parts(tensor: TensorHandle) -> Iterable[TensorHandle]:
    return tensor.storage.parts if isinstance(tensor, PackedHandle) else (tensor,)


def run_quantized(checkpoint: Path, quantized: Path, activations: Activations) -> Logits:
    """Load a quantized checkpoint in float32: all of its decoder, and embedding and head of the one it was made from.

    Tools scale channels, so that norms change with the linears.
    """
    model = load_model(checkpoint)
    kept = {id(module.weight) for module in (model.get_input_embeddings(), head_of(model))}
    sources = resolve_parameters(model, open_checkpoint(str(quantized)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) not in kept:
                parameter.copy_(sources[name].load().float())
    if activations != "float32":
        quantize_inputs(decoder_linears(model).values(), activations)
    return logits_of(model)


def quantize_inputs(linears: Iterable[nn.Linear], activations: Activations) -> None:
    """Let linears read what is left of their inputs in INT8 or FP8 (E4M3), symmetric, with a scale for every token."""
    for linear in linears:
        linear.register_forward_pre_hook(lambda module, inputs: (rounded(inputs[0], activations), *inputs[1:]))


def rounded(values: torch.Tensor, activations: Activations) -> torch.Tensor:
    """Round float32 values `[..., K]` to INT8 or E4M3 numbers times the scale of their row; return them as float32."""
    largest = _LARGEST[activations]
    scales = (values.abs().amax(-1, keepdim=True) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (values / scales).clamp(-largest, largest)
    numbers = scaled.round() if activations == "int8" else scaled.to(torch.float8_e4m3fn).float()
    return numbers * scales


def logits_of(model: PreTrainedModel) -> Logits:
    """Return what runs a model on one sequence."""

    def run(token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.inference_mode():
            logits: NDArray[np.float32] = model(torch.from_numpy(token_ids)[None], use_cache=False).logits[0].numpy()
        return logits

    return run


def mean_squares(model: PreTrainedModel, windows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
    """Run `windows`, int64 `[W, T]`; return E[x²] of each decoder linear's input channels, float32 `[K]`, by name."""
    sums: dict[str, torch.Tensor] = {}

    def add(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            squares = inputs[0].reshape(-1, inputs[0].shape[-1]).double().square().sum(0)
            sums[name] = sums[name] + squares if name in sums else squares

        return hook

    handles = [linear.register_forward_pre_hook(add(name)) for name, linear in decoder_linears(model).items()]
    with torch.inference_mode():
        for window in windows:
            decoder_of(model)(torch.from_numpy(window)[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: (value / windows.size).float().numpy() for name, value in sums.items()}
