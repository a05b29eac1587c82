"""A rank's part of a bundle, which backends open like a bundle of its own."""

from __future__ import annotations

import hashlib
from typing import Any

from numpy.typing import NDArray

from inferencex.formats.bundle import Bundle
from inferencex.formats.bundle.mapped_file import MappedFile
from inferencex.formats.bundle.shards import StoredTensor
from inferencex.formats.errors import BackendError, BundleError
from inferencex.runtime.parallel.shard import Shard
from inferencex.runtime.parallel.tensors import cut_tensor


class BundleShard(Bundle):
    """A bundle whose graph and tensors are those of one rank; the files are the whole bundle's."""

    def __init__(self, bundle: Bundle, shard: Shard) -> None:
        stored = {
            name: StoredTensor(
                name,
                cut.dtype,
                (cut.nbytes,) if cut.bits != cut.dtype.bitwidth else cut.cut_shape,
                bundle.stored[cut.source].location,
                bundle.stored[cut.source].offset,
                cut.nbytes,
            )
            for name, cut in shard.tensors.items()
        }
        super().__init__(bundle.path, bundle.manifest, bundle._proto, shard.graph, stored)
        self.shard = shard
        self._bundle = bundle

    @property
    def model(self) -> Any:
        """A graph to edit, which a part of a bundle does not have. Raises BackendError."""
        raise BackendError(f"{self.path}: only the graph of the whole bundle can be edited; use another backend")

    def tensor(self, name: str) -> NDArray[Any]:
        """Return the rank's part of a stored tensor, in its storage type. Raises BundleError for an unknown name."""
        cut = self.shard.tensors.get(name)
        if cut is None:
            raise BundleError(f"{self.path}: rank {self.shard.rank} has no tensor named {name!r}")
        return cut_tensor(self._bundle.tensor(cut.source), cut)

    def mapped_files(self) -> list[MappedFile]:
        """Return the weight files of the whole bundle; see `Bundle`."""
        return self._bundle.mapped_files()

    def release(self) -> None:
        """Let the system take back the memory of weights that were read."""
        self._bundle.release()

    def digest(self) -> str:
        """Return a hash of the types, shapes and sizes of the rank's tensors, and of the files they are read from."""
        digest = hashlib.sha256()
        for name, stored in sorted(self.stored.items()):
            digest.update(f"{name}\0{stored.dtype.name}\0{stored.shape}\0{stored.nbytes}\n".encode())
        for name, record in sorted(self.files.items()):
            digest.update(f"{name}\0{record.size}\0{record.sha256}\n".encode())
        return digest.hexdigest()
