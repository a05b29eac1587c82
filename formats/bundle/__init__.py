"""The bundle: what conversion writes and every backend reads."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from inferencex.formats.bundle.manifest import FileRecord, Manifest, TensorQuantization
from inferencex.formats.bundle.reader import Bundle
from inferencex.formats.bundle.shards import StoredTensor

if TYPE_CHECKING:
    from inferencex.formats.bundle.staging import check_destination as check_destination
    from inferencex.formats.bundle.staging import check_disk_space as check_disk_space
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


_HOMES = {"BundleWriter": "writer", "check_destination": "staging", "check_disk_space": "staging"}


def __getattr__(name: str) -> Any:
    """Import what writes when it is asked for: it brings onnx-ir, which reading a bundle does without."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
