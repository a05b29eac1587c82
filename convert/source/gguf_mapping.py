"""Names and layouts of GGUF tensors, turned into the model's by transformers' own tables and processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform
from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, is_gguf_arch_supported
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from inferencex.convert.source.base import Checkpoint, TensorHandle
from inferencex.convert.source.gguf_file import read_gguf
from inferencex.convert.source.gguf_rope import FACTOR_TENSORS
from inferencex.convert.source.parameter import ParameterSource
from inferencex.formats.errors import SourceError

# No processor changes the values of these, so their rows can be read one by one.
_ROW_READABLE = ("token_embd.weight", "output.weight")


@dataclass(frozen=True)
class GgufMatches:
    """Recipes by parameter name, and tensors of the file that fill no parameter."""

    sources: Mapping[str, ParameterSource]
    unused: Sequence[str]


def gguf_parameters(model: PreTrainedModel, checkpoint: Checkpoint) -> GgufMatches | list[WeightTransform]:
    """Match the file's tensors with `model`'s parameters.

    For the architectures whose GGUF layout transformers describes by weight transforms, returns these instead.
    Raises SourceError when the `gguf` package has no table of names for the model.
    """
    architecture = str(read_gguf(checkpoint.weight_files[0].path).metadata["general.architecture"])
    if is_gguf_arch_supported(architecture):
        transforms: list[WeightTransform] = get_gguf_conversion_mapping(architecture, model.config)
        return transforms
    make: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processor = make(config=checkpoint.config.to_dict())
    names = _parameter_names(model, architecture, processor, set(checkpoint.tensors))
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    groups: dict[str, list[TensorHandle]] = {}
    unused = []
    for name, handle in checkpoint.tensors.items():
        # Stacked experts are listed under the name of the module list, which has no `.weight`.
        target = names.get(name, names.get(name.removesuffix(".weight")))
        if target is not None and target in expected:
            groups.setdefault(target, []).append(handle)
        elif name not in FACTOR_TENSORS:
            unused.append(name)
    sources = {
        target: _source(target, expected[target], handles, processor, names) for target, handles in groups.items()
    }
    return GgufMatches(sources, unused)


def _parameter_names(model: PreTrainedModel, architecture: str, processor: Any, wanted: set[str]) -> dict[str, str]:
    """`{name in the file: name in the model}`, from the tables of the `gguf` package.

    The tables were written for the class that each family was converted from, often the base model, so names are
    looked up whole first and then without their leading parts until every tensor of the file is found.
    """
    arch = next((key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), None)
    if arch is None:
        raise SourceError(f"the gguf package has no tensor names for architecture {architecture!r}; upgrade it")
    table = gguf.get_tensor_name_map(arch, model.config.get_text_config().num_hidden_layers)
    expected = list(model.state_dict())
    names: dict[str, str] = {}
    for depth in range(max(name.count(".") for name in expected)):
        for full_name in expected:
            if full_name.count(".") < depth:
                continue
            name = processor.preprocess_name(full_name.split(".", depth)[-1])
            stem, suffix = name, ""
            if name.endswith((".weight", ".bias")):
                stem, _, suffix = name.rpartition(".")
                suffix = "." + suffix
            if (found := table.get_name(stem)) is not None:
                names.setdefault(found + suffix, full_name)
            elif depth == 0:
                processor.perform_fallback_tensor_mapping(names, suffix, "", name)
        if all(name in names or name.removesuffix(".weight") in names for name in wanted):
            break
    return names


def _source(
    target: str,
    shape: tuple[int, ...],
    handles: Sequence[TensorHandle],
    processor: Any,
    names: Mapping[str, str],
) -> ParameterSource:
    elements = sum(prod(handle.shape) for handle in handles)
    if elements != prod(shape):
        shape = handles[0].shape  # reported as a mismatch together with all the others
    dtypes = {handle.dtype for handle in handles}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32

    def load() -> torch.Tensor:
        parsed: dict[str, Any] = {"tensors": {}}
        for handle in handles:
            stored = handle.load()
            # numpy has no bfloat16, and the processors' arithmetic (a norm's `w - 1`) wants float32.
            values = stored.float().numpy() if stored.is_floating_point() else stored.numpy()
            made = processor.process(
                weights=values, name=handle.name, tensor_key_mapping=names, parsed_parameters=parsed
            )
            if made.name is not None:
                parsed["tensors"][target] = made.weights
        value = parsed["tensors"][target]
        whole = torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
        narrow: torch.Tensor = whole.to(dtype)
        return narrow

    rows = handles[0].rows if len(handles) == 1 and handles[0].name in _ROW_READABLE else None
    sources = tuple(handle.name for handle in handles)
    return ParameterSource(target, shape, dtype, sources, load, rows)
