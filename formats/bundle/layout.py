"""Names and limits of the files that make up a bundle."""

from __future__ import annotations

import re

from inferencex.formats.errors import BundleError

FORMAT_VERSION = 1
MANIFEST_FILE = "bundle.json"
GRAPH_FILE = "model.onnx"
PLOT_FILE = "report.svg"
REPORT_FILES = ("report.json", "report.md", PLOT_FILE)

MAX_SHARD_SIZE = 4 << 30
"""Bytes of a weight file; only a single tensor that is larger than this makes a larger file."""

HEADER_RESERVE = 64 << 10
"""Bytes kept for the header of a weight file, which is known only once its tensors are written.

The rest of it is filled with spaces, as safetensors allows, so a shard's data starts on a page.
"""

TENSOR_ALIGNMENT = 64
"""Bytes; a cache line, and the widest vector register."""

MAX_MANIFEST_SIZE = 64 << 20
MAX_GRAPH_SIZE = (2 << 30) - 1
"""Protocol buffers end here."""
MAX_HEADER_SIZE = 100_000_000
"""The safetensors library's own limit."""
MAX_NAME_LENGTH = 1024
MAX_RANK = 16
MAX_ELEMENTS = 1 << 48

_SHARD_NAME = re.compile(r"weights-\d{5,}-of-\d{5,}\.safetensors")


def shard_name(index: int, count: int) -> str:
    """Return the file name of weight file `index` (counted from 1) of `count`."""
    return f"weights-{index:05d}-of-{count:05d}.safetensors"


def is_shard_name(name: str) -> bool:
    """Whether `name` is the name of a weight file."""
    return _SHARD_NAME.fullmatch(name) is not None


def is_reserved(name: str) -> bool:
    """Whether a bundle writes a file of this name itself, so that no side file may have it."""
    return name in (MANIFEST_FILE, GRAPH_FILE, *REPORT_FILES) or is_shard_name(name)


def check_file_name(name: str, where: str) -> None:
    """Refuse names that do not stay inside the bundle's folder; raises BundleError naming `where`."""
    parts = name.split("/")
    hostile = any(part in ("", ".", "..") or len(part.encode(errors="replace")) > 255 for part in parts)
    hostile = hostile or "\\" in name or ":" in name
    if hostile or not name.isprintable() or len(name) > MAX_NAME_LENGTH:
        raise BundleError(
            f"{where}: {name[:80]!r} is not the name of a file inside the bundle (expected a plain relative path)"
        )
