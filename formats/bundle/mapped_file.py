"""A weight file in memory, which can be opened again if it is still the one that its path names."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.records import record


@record(frozen=True, eq=False)
class MappedFile:
    """A file that is mapped to memory, made by `map`.

    path:      where it was found
    data:      what it holds, read-only, uint8 `[nbytes]`
    identity:  device and number of the file, which the path may name no longer
    """

    path: Path
    data: NDArray[np.uint8]
    identity: tuple[int, int]

    @classmethod
    def map(cls, path: Path) -> MappedFile:
        """Map a file that is not empty. Raises OSError."""
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            # As a plain array: numpy.memmap makes an object of its own of every slice.
            data = np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))
        return cls(path, data, (status.st_dev, status.st_ino))

    def open(self) -> int | None:
        """Return a descriptor of the same file, to be closed by the caller; None if it is not to be had any more."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # whatever the path names by now
        except OSError:  # removed since, or too many files are open
            return None
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) == self.identity:
            return descriptor
        os.close(descriptor)
        return None

    def release(self) -> None:
        """Let the system take back the memory of what was read; reading it again brings it back."""
        pages = getattr(self.data.base, "_mmap", None)
        if isinstance(pages, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            pages.madvise(mmap.MADV_DONTNEED)
