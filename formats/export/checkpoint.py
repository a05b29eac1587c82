"""A folder in the Hugging Face layout: safetensors files, their index, config.json and the bundle's side files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.bundle import Bundle
from inferencex.formats.bundle.layout import HEADER_RESERVE, MAX_SHARD_SIZE, is_reserved
from inferencex.formats.bundle.manifest import parse_json_object
from inferencex.formats.bundle.shards import ShardWriter
from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import ExportError
from inferencex.formats.export.parameters import Parameter, stored_type

CONFIG_FILE = "config.json"
_INDEX_FILE = "model.safetensors.index.json"
_SHARD = re.compile(r"weights-(\d+)-of-(\d+)\.safetensors")
_MAX_CONFIG_SIZE = 16 << 20
_FLOATS = {"float32": DataType.FLOAT, "float16": DataType.FLOAT16, "bfloat16": DataType.BFLOAT16}


def read_config(bundle: Bundle) -> dict[str, Any]:
    """Return the source's config.json. Raises ExportError when the bundle has none."""
    return read_json(bundle, CONFIG_FILE)


def read_json(bundle: Bundle, name: str) -> dict[str, Any]:
    """Return a JSON object among the bundle's side files. Raises ExportError when it is not there."""
    if name not in bundle.files:
        raise ExportError(f"{bundle.path}: holds no {name}, which the exported model needs")
    return parse_json_object((bundle.path / name).read_bytes(), str(bundle.path / name), _MAX_CONFIG_SIZE)


def dtype_of(config: Mapping[str, Any]) -> DataType:
    """Return the element type that a config asks its model to be loaded in; float32 where it says nothing."""
    return _FLOATS.get(str(config.get("dtype", config.get("torch_dtype"))), DataType.FLOAT)


def copy_side_files(bundle: Bundle, folder: Path, *, without: tuple[str, ...] = ()) -> None:
    """Copy what the bundle carries for the tokenizer and for generation."""
    for name in bundle.files:
        if is_reserved(name) or name in without:
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.path / name, target)


class CheckpointWriter:
    """Writes tensors into a folder as they come, then the rest of a checkpoint."""

    def __init__(self, bundle: Bundle, folder: Path) -> None:
        self.bundle = bundle
        self.folder = folder
        self.config = read_config(bundle)
        self._dtype = dtype_of(self.config)
        self._shards = ShardWriter(folder, MAX_SHARD_SIZE)

    def add(self, name: str, values: NDArray[Any]) -> None:
        """Store an array under its name, in the type that it has."""
        self._shards.add(name, np.ascontiguousarray(values), stored_type(values), values.shape)

    def add_plain(self, parameter: Parameter) -> None:
        """Store a parameter that stays unquantized, in the config's element type where that loses nothing."""
        values = parameter.plain()
        if values.dtype == np.float32 and self._dtype != DataType.FLOAT:
            narrow = values.astype(self._dtype.numpy())
            if np.array_equal(narrow.astype(np.float32), values):
                values = narrow
        self.add(parameter.name, values)

    def finish(self, quantization_config: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> None:
        """Name the weight files, and write index, config and side files."""
        stored = self._shards.finish()
        names: dict[str, str] = {}
        for file in sorted({tensor.location for tensor in stored.values()}):
            match = _SHARD.fullmatch(file)
            assert match is not None
            alone = int(match[2]) == 1
            names[file] = "model.safetensors" if alone else f"model-{match[1]}-of-{match[2]}.safetensors"
            (self.folder / file).rename(self.folder / names[file])
            _mark(self.folder / names[file])
        if len(names) > 1:
            index = {
                "metadata": {"total_size": sum(tensor.nbytes for tensor in stored.values())},
                "weight_map": {name: names[tensor.location] for name, tensor in sorted(stored.items())},
            }
            write_json(self.folder / _INDEX_FILE, index)
        config = {**self.config, **(changes or {}), "quantization_config": dict(quantization_config)}
        copy_side_files(self.bundle, self.folder, without=(CONFIG_FILE,))
        write_json(self.folder / CONFIG_FILE, config)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, readable."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _mark(path: Path) -> None:
    """Say in a weight file's header that its tensors are laid out as torch has them; some loaders insist on it."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = {"__metadata__": {"format": "pt"}, **json.loads(file.read(size))}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > size:
            raise ExportError(f"{path}: the header of a weight file takes more than the {HEADER_RESERVE} bytes kept")
        file.seek(8)
        file.write(text + b" " * (size - len(text)))
