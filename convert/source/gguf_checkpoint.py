"""A GGUF file as a checkpoint: configuration, tokenizer and side files rebuilt from its metadata by transformers."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS, get_gguf_config
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from inferencex.convert.source.base import Checkpoint, TensorHandle, WeightFile
from inferencex.convert.source.directory import CONFIG_ERRORS
from inferencex.convert.source.gguf_file import GgufFile, read_gguf_parts
from inferencex.convert.source.gguf_rope import apply_rope_scaling
from inferencex.convert.source.gguf_tokenizer import write_tokenizer
from inferencex.convert.source.scratch import Scratch
from inferencex.formats.errors import SourceError

_EMBEDDING = "token_embd.weight"
# Settings that the shapes of the tensors confirm, whatever the configuration's defaults are.
_CHECKED_SETTINGS = {
    "attention.key_length",
    "attention.value_length",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "rope.dimension_count",
    "vocab_size",
}


def open_gguf(path: Path, *, name: str) -> Checkpoint:
    """Open a GGUF file, or any part of a split one.

    `tensors` are named and laid out as in the file; `resolve_parameters` turns them into the model's.
    Raises SourceError when the file is damaged or describes a model or tokenizer that transformers cannot rebuild.
    """
    parts = read_gguf_parts(path)
    tensors: dict[str, TensorHandle] = {name: handle for part in parts for name, handle in part.tensors.items()}
    scratch = Scratch()
    directory = scratch.path
    config = _read_config(parts, directory)
    apply_rope_scaling(config, parts)
    config_dict = _write_configs(config, parts[0], directory)
    warnings = [*_unused_settings(config, parts[0]), *write_tokenizer(parts[0], directory)]
    return Checkpoint(
        name=name,
        kind="gguf",
        revision=None,
        config=config,
        config_dict=config_dict,
        tensors=tensors,
        files={file.name: file for file in sorted(directory.iterdir())},
        weight_files=tuple(WeightFile(part.path, part.size) for part in parts),
        trust_remote_code=False,
        directory=directory,
        warnings=tuple(warnings),
        scratch=scratch,
    )


def architecture_of(part: GgufFile) -> str:
    """The value of `general.architecture`. Raises SourceError when there is none."""
    architecture = part.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise SourceError(f"{part.path}: has no general.architecture, so it is not a language model")
    return architecture


def _read_config(parts: Sequence[GgufFile], directory: Path) -> PreTrainedConfig:
    """Let transformers derive the configuration from the metadata and the names of the tensors."""
    first = parts[0]
    architecture = architecture_of(first)
    names = [name for part in parts for name in part.tensors]
    try:
        if architecture in GGUF_CONFIG_ARCHS:
            metadata, _ = read_gguf_metadata(str(first.path))
            config: PreTrainedConfig = AutoConfig.for_model(**get_gguf_config(metadata, tuple(names)))
        else:
            config = _read_config_of_stub(first, names, directory / "metadata.gguf")
    except CONFIG_ERRORS as error:
        raise SourceError(
            f"{first.path}: transformers cannot read the architecture {architecture!r} from GGUF ({error!r}); "
            "use the Hugging Face checkpoint of the model"
        ) from error
    embedding = next((part.tensors[_EMBEDDING] for part in parts if _EMBEDDING in part.tensors), None)
    if embedding is not None:
        config.vocab_size = embedding.shape[0]
    if not config.architectures:
        # GGUF names no class.
        known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if known is None:
            raise SourceError(f"{first.path}: model type {config.model_type!r} is not a causal language model")
        config.architectures = [known]
    return config


def _read_config_of_stub(first: GgufFile, names: Sequence[str], stub: Path) -> PreTrainedConfig:
    """Read the configuration from a file of the same metadata without the vocabulary.

    transformers' older reader builds a Python object for every string, which takes seconds, and the configuration
    depends on none of them but for their number.
    """
    stub.write_bytes(_without_vocabulary(first, names))
    # It warns of the absent vocabulary, whose size is set by the caller.
    quieted = logging.getLogger("transformers.modeling_gguf_pytorch_utils")
    level = quieted.level
    quieted.setLevel(logging.ERROR)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(stub.parent, gguf_file=stub.name, local_files_only=True)
    finally:
        stub.unlink()
        quieted.setLevel(level)
    return config


def _unused_settings(config: PreTrainedConfig, first: GgufFile) -> list[str]:
    """Warn of settings in the file that transformers' configuration of it does not take over."""
    architecture = architecture_of(first)
    if architecture in GGUF_CONFIG_ARCHS:
        return []
    mapping: Any = GGUF_CONFIG_MAPPING
    table = mapping.get(config.model_type) or mapping.get(architecture, {})
    keys = [key.removeprefix(f"{architecture}.") for key in first.metadata if key.startswith(f"{architecture}.")]
    unused = [key for key in keys if key not in table and key not in _CHECKED_SETTINGS and "rope.scaling." not in key]
    if not unused:
        return []
    return [
        f"{first.path.name}: transformers' {type(config).__name__} uses its defaults in place of these settings: "
        f"{', '.join(sorted(unused))}"
    ]


def _without_vocabulary(first: GgufFile, names: Sequence[str]) -> bytes:
    """A GGUF file of `first`'s metadata without its long arrays, listing tensors `names` with one element each."""
    with first.path.open("rb") as stream:
        blob = stream.read(max(stop for _, stop in first.entries.values()))
    spans = [
        span
        for key, span in first.entries.items()
        if key not in first.strings or first.strings[key] < 256
        if not (key.startswith("tokenizer.") and isinstance(first.metadata.get(key), tuple))
    ]
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(names), len(spans)))
    for start, stop in spans:
        out += blob[start:stop]
    for name in names:
        raw = name.encode("utf-8")
        out += struct.pack("<Q", len(raw)) + raw + struct.pack("<IQIQ", 1, 1, 0, 0)
    alignment = first.metadata.get("general.alignment", 32)
    assert isinstance(alignment, int)
    out += bytes(-len(out) % alignment + alignment)
    return bytes(out)


def _write_configs(config: PreTrainedConfig, first: GgufFile, directory: Path) -> dict[str, Any]:
    """Write config.json and generation_config.json, the same bytes for the same GGUF, and return the former."""
    config_dict: dict[str, Any] = config.to_diff_dict()
    config_dict.pop("_name_or_path", None)
    config_dict.pop("_model_name_or_path", None)
    _write_json(directory / "config.json", config_dict)
    generation = GenerationConfig.from_model_config(config)
    generation_dict = {key: value for key, value in generation.to_diff_dict().items() if not key.startswith("_")}
    _write_json(directory / "generation_config.json", generation_dict)
    return config_dict


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
