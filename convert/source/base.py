"""The contract of a checkpoint: a config, lazily read tensors, side files, and where all of it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from transformers import PreTrainedConfig

from inferencex.convert.source.scratch import Scratch

Kind = Literal["local", "hub", "gguf", "random"]

_HASH_CHUNK = 1 << 22


class TensorHandle(Protocol):
    """One stored tensor, not read until asked for.

    `shape` is outermost axis first. `dtype` is that of the tensor `load` returns: block-quantized GGUF tensors come
    back as float32. `stored` is a safetensors dtype such as "BF16", or a GGML type such as "Q4_1".
    """

    @property
    def name(self) -> str:
        """Name in the file."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the loaded tensor."""
        ...

    @property
    def stored(self) -> str:
        """Format in the file."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        ...

    def load(self) -> torch.Tensor:
        """Return the whole tensor, a private memory-mapped view where the file's layout allows it.

        Each call maps anew and the mapping lives as long as the tensor, so memory is held only while the
        caller holds the tensor. Raises SourceError when the file has changed since it was opened.
        """
        ...

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return `load()[start:stop]` without touching the other rows of the first axis."""
        ...


@dataclass(frozen=True)
class WeightFile:
    """A file that weights are read from."""

    path: Path
    size: int  # bytes

    def sha256(self) -> str:
        """Hash the whole file, lower-case hexadecimal; reads every byte."""
        digest = hashlib.sha256()
        with self.path.open("rb") as stream:
            while chunk := stream.read(_HASH_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A model as its authors published it, opened and checked, its weights still on disk.

    name:               what the user asked for: a path, a hub id or an alias
    kind:               "local" (directory), "hub", "gguf", or "random" (a config alone)
    revision:           the hub commit the files belong to, where known
    config:             the model's configuration, of its own transformers class
    config_dict:        `config.json` as it was read, before transformers filled in defaults
    tensors:            every stored tensor by its name in the file; empty for kind "random"
    files:              side files to copy byte for byte, by path relative to the bundle
    weight_files:       the files that `tensors` are read from, in reading order
    trust_remote_code:  whether the checkpoint's own Python code may run; to be handed to every loader
    directory:          folder that `AutoModel` and `AutoTokenizer` can load config and tokenizer from
    seed:               of the random weights of kind "random"
    packed:             the method that its weights are quantized with already, or None
    warnings:           what a user should be told about this source, one sentence each
    """

    name: str
    kind: Kind
    revision: str | None
    config: PreTrainedConfig
    config_dict: Mapping[str, Any]
    tensors: Mapping[str, TensorHandle]
    files: Mapping[str, Path]
    weight_files: Sequence[WeightFile]
    trust_remote_code: bool
    directory: Path
    seed: int = 0
    warnings: Sequence[str] = ()
    packed: str | None = None
    # Keeps a temporary `directory` alive exactly as long as the checkpoint.
    scratch: Scratch | None = field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes that the stored tensors take."""
        return sum(handle.nbytes for handle in self.tensors.values())

    def provenance(self, *, hash_files: bool = False) -> dict[str, object]:
        """Describe the source for `bundle.json`; `hash_files` adds the sha256 of every weight file.

        Holds nothing that depends on where the checkpoint lies on this machine, except `id` when the user
        named a path: a path is recorded by its last part only.
        """
        files: list[dict[str, object]] = []
        for file in self.weight_files:
            entry: dict[str, object] = {"name": file.path.name, "size": file.size}
            if hash_files:
                entry["sha256"] = file.sha256()
            files.append(entry)
        identity = Path(self.name).resolve().name if Path(self.name).exists() else self.name
        facts: dict[str, object] = {"id": identity, "kind": self.kind, "revision": self.revision, "files": files}
        if self.kind == "random":
            facts["seed"] = self.seed
        if self.packed is not None:
            facts["quantized"] = self.packed
        return facts
