"""A directory in the Hugging Face layout: config.json, weights in one or many shards, tokenizer and the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from inferencex.convert.source.base import Checkpoint, Kind, TensorHandle, WeightFile
from inferencex.convert.source.packed.collect import Collected, PackedFormat, collect_packed, packed_format
from inferencex.convert.source.packed.settings import KEYS
from inferencex.convert.source.pickle_file import read_pickle
from inferencex.convert.source.safetensors_file import parse_object, read_safetensors
from inferencex.convert.source.scratch import Scratch
from inferencex.convert.source.tokenizer_file import convert_tokenizer
from inferencex.formats.errors import SourceError

# Everything a runtime, a tokenizer or a licence reader may want; weights of any format are never among them.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
CODE_FILES = ("*.py",)
# What transformers raises for a configuration that makes no sense to it.
CONFIG_ERRORS = (
    StrictDataclassError,
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    NotImplementedError,
)
SAFETENSORS_FILES = ("model.safetensors", "model.safetensors.index.json")
PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Any one of these is a tokenizer; only the first is read without transformers.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Weights:
    """The stored tensors of a checkpoint and the files that hold them."""

    tensors: Mapping[str, TensorHandle]
    files: tuple[WeightFile, ...]


NO_WEIGHTS = Weights({}, ())


def open_directory(
    directory: Path,
    *,
    name: str,
    kind: Kind = "local",
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    random_weights: bool = False,
    seed: int = 0,
) -> Checkpoint:
    """Open a directory that holds config.json and, unless `random_weights`, safetensors (or pickled) weights.

    Raises SourceError naming the file at fault; all headers are checked before this returns.
    """
    config_dict, config, packing = read_config(directory, name=name, trust_remote_code=trust_remote_code)
    weights = NO_WEIGHTS if random_weights else read_weights(directory, allow_pickle=allow_pickle)
    collected = Collected({})
    if not random_weights:
        collected = collect_packed(weights.tensors, packing, str(directory / "config.json"))
    files = side_files(directory, with_code=trust_remote_code)
    warnings = list(collected.warnings)
    if random_weights and packing is not None:
        warnings.append(f"{name} is quantized ({packing.method}); the weights that are made up for it are plain")
    scratch: Scratch | None = None
    if not any(candidate in files for candidate in TOKENIZER_FILES):
        warnings.append(f"{name} has no tokenizer ({', '.join(TOKENIZER_FILES)}): its bundle takes token ids, not text")
    elif "tokenizer.json" not in files:
        scratch = Scratch()
        reason = convert_tokenizer(directory, scratch.path, name=name, trust_remote_code=trust_remote_code)
        if reason is None:
            files["tokenizer.json"] = scratch.path / "tokenizer.json"
        else:
            warnings.append(reason)
    return Checkpoint(
        name=name,
        kind="random" if random_weights else kind,
        revision=revision,
        config=config,
        config_dict=config_dict,
        tensors=collected.tensors,
        files=files,
        weight_files=weights.files,
        trust_remote_code=trust_remote_code,
        directory=directory,
        seed=seed,
        warnings=tuple(warnings),
        packed=collected.method,
        scratch=scratch,
    )


def read_config(
    directory: Path, *, name: str, trust_remote_code: bool
) -> tuple[dict[str, Any], PreTrainedConfig, PackedFormat | None]:
    """Read config.json: as written, as the transformers configuration of the plain model, and how it is quantized.

    Raises SourceError when it is missing or damaged, describes weights that are quantized in a way that is not read,
    or needs Python code of its own while `trust_remote_code` is off.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise SourceError(
            f"{path}: not found; a checkpoint directory needs a config.json (found: {_listing(directory)})"
        )
    config_dict = parse_object(path.read_bytes(), str(path))
    packing = packed_format(config_dict, str(path))
    model_type = config_dict.get("model_type")
    native = model_type in CONFIG_MAPPING
    if "auto_map" in config_dict and not native and not trust_remote_code:
        raise SourceError(
            f"{name}: model type {model_type!r} is defined by Python code inside the checkpoint, which is not run by "
            "default; read that code, then pass --trust-remote-code if you trust it"
        )
    if not native and "auto_map" not in config_dict:
        raise SourceError(f"{path}: model_type {model_type!r} is not known to the installed transformers; upgrade it")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except CONFIG_ERRORS as error:
        raise SourceError(f"{path}: transformers cannot make a configuration of it ({error})") from error
    remove_quantization(config)
    return config_dict, config, packing


def remove_quantization(config: PreTrainedConfig) -> None:
    """Take out of a configuration, in place, that the weights are quantized: the model is built with plain layers."""
    parts = (getattr(config, name, None) for name in config.sub_configs)
    for part in (config, *(part for part in parts if part is not None)):
        for key in KEYS:
            if hasattr(part, key):
                delattr(part, key)


def read_weights(directory: Path, *, allow_pickle: bool) -> Weights:
    """Find and check the weights of `directory`: safetensors if there are any, else pickles when allowed."""
    single, index = (directory / file for file in SAFETENSORS_FILES)
    if single.is_file():
        return Weights(dict(read_safetensors(single)), (_weight_file(single),))
    if index.is_file():
        return _read_shards(index, pickled=False)
    pickled = [directory / file for file in PICKLE_FILES if (directory / file).is_file()]
    if not pickled:
        raise SourceError(
            f"{directory}: no weights: expected {' or '.join(SAFETENSORS_FILES)} (found: {_listing(directory)}); "
            "pass --random-weights to convert the configuration alone"
        )
    if not allow_pickle:
        raise SourceError(
            f"{pickled[0]}: the weights are pickles, a format that can run code when it is read; ask for a safetensors "
            "version, or pass --allow-pickle to read the tensors with PyTorch's restricted unpickler"
        )
    if pickled[0].suffix == ".bin":
        return Weights(dict(read_pickle(pickled[0])), (_weight_file(pickled[0]),))
    return _read_shards(pickled[0], pickled=True)


def side_files(directory: Path, *, with_code: bool) -> dict[str, Path]:
    """Files of `directory` to copy beside the weights, by their path relative to it, sorted."""
    patterns: Iterable[str] = (*SIDE_FILES, *CODE_FILES) if with_code else SIDE_FILES
    found = {path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}
    return {path.relative_to(directory).as_posix(): path for path in sorted(found)}


def _read_shards(index: Path, *, pickled: bool) -> Weights:
    """Read every shard that `index` names, and check that shards and index say the same."""
    weight_map = parse_object(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index}: has no weight_map from tensor names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise SourceError(f"{index}: tensor {name!r} is said to be in {file!r}, which is not a plain file name")
    shard_names = sorted(set(weight_map.values()))
    absent = [file for file in shard_names if not (index.parent / file).is_file()]
    if absent:
        raise SourceError(f"{index}: names files that are not there: {', '.join(absent)}; fetch them")
    tensors: dict[str, TensorHandle] = {}
    found_in: dict[str, str] = {}
    for file in shard_names:
        path = index.parent / file
        shard: Mapping[str, TensorHandle] = read_pickle(path) if pickled else read_safetensors(path)
        for name, handle in shard.items():
            if name in found_in:
                raise SourceError(f"{path}: tensor {name!r} is also in {found_in[name]}; which one is meant is unknown")
            if name not in weight_map:
                raise SourceError(f"{path}: holds tensor {name!r}, which {index.name} does not name")
            if weight_map[name] != file:
                raise SourceError(f"{path}: holds tensor {name!r}, which {index.name} places in {weight_map[name]}")
            found_in[name] = file
            tensors[name] = handle
    missing = [name for name in weight_map if name not in tensors]
    if missing:
        raise SourceError(
            f"{index.parent / weight_map[missing[0]]}: lacks {len(missing)} tensor(s) that {index.name} places there: "
            f"{', '.join(missing[:10])}"
        )
    return Weights(tensors, tuple(_weight_file(index.parent / file) for file in shard_names))


def _weight_file(path: Path) -> WeightFile:
    return WeightFile(path, path.stat().st_size)


def _listing(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "nothing"
