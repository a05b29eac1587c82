"""The bundle: what conversion writes and every backend reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inferencex.formats.bundle.manifest import FileRecord, Manifest, TensorQuantization
from inferencex.formats.bundle.reader import Bundle
from inferencex.formats.bundle.shards import StoredTensor
from inferencex.formats.bundle.staging import check_destination, check_disk_space

if TYPE_CHECKING:
    from inferencex.formats.bundle.writer import BundleWriter as BundleWriter

__all__ = [
    "Bundle",
    "BundleWriter",
    "FileRecord",
    "Manifest",
    "StoredTensor",
    "TensorQuantization",
    "check_destination",
    "check_disk_space",
]


def __getattr__(name: str) -> Any:
    """Import the writer when it is asked for: it brings onnx-ir, which reading a bundle does without."""
    if name != "BundleWriter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from inferencex.formats.bundle.writer import BundleWriter

    return BundleWriter
