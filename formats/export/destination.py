"""Where an export goes: checked before any work, written beside it and put in place at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inferencex.formats.bundle.staging import Staging
from inferencex.formats.errors import ExportError

RECORD_FILE = "export.json"
"""What an exported folder says about itself, and by which it is known to be ours to replace."""

_MAX_RECORD_SIZE = 16 << 20
_GGUF_MAGIC = b"GGUF"


def check_destination(path: Path, bundle: Path, *, overwrite: bool, is_file: bool) -> None:
    """Refuse a destination that must not be written; raises ExportError.

    Only an absent path, an empty folder, or, with `overwrite`, an earlier export may be written.
    """
    target, source = path.resolve(), bundle.resolve()
    if target == source or target.is_relative_to(source) or source.is_relative_to(target):
        raise ExportError(f"{path}: is the bundle, lies in it or holds it; choose another --output")
    if path.is_symlink():
        raise ExportError(f"{path}: is a symbolic link; give the place it points to, or another --output")
    if not path.exists():
        return
    if path.is_dir() == is_file:
        kind = "a folder, and this format is one file" if is_file else "a file, and this format is a folder"
        raise ExportError(f"{path}: is {kind}; choose another --output")
    if is_file:
        with path.open("rb") as file:
            ours = file.read(4) == _GGUF_MAGIC
        if not ours:
            raise ExportError(f"{path}: exists and is no GGUF file; choose another --output")
    elif any(path.iterdir()):
        foreign = sorted(_files(path) - _recorded(path))
        if foreign:
            shown = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
            raise ExportError(f"{path}: holds files that no export wrote: {shown}; choose another --output")
    else:
        return
    if not overwrite:
        raise ExportError(
            f"{path}: already holds an export; pass --overwrite to replace it, or choose another --output"
        )


def _files(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()}


def _recorded(path: Path) -> set[str]:
    """Return the files that the export in a folder lists."""
    record = path / RECORD_FILE
    if not record.is_file() or record.stat().st_size > _MAX_RECORD_SIZE:
        return set()
    try:
        files = json.loads(record.read_bytes()).get("files")
    except (ValueError, AttributeError):
        return set()
    return {RECORD_FILE, *files} if isinstance(files, dict) else set()


@contextmanager
def staged_folder(path: Path, record: dict[str, Any]) -> Iterator[Path]:
    """Give a folder to write in; it becomes `path` at the end, with `record` and the sizes of its files added."""
    staging = Staging(path)
    try:
        yield staging.path
        files = {name: (staging.path / name).stat().st_size for name in sorted(_files(staging.path))}
        text = json.dumps({**record, "files": files}, indent=1, sort_keys=True, ensure_ascii=False)
        (staging.path / RECORD_FILE).write_text(text + "\n", encoding="utf-8")
        staging.commit()
    except BaseException:
        staging.discard()
        raise


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Give the path of a file to write; it becomes `path` at the end."""
    staging = Staging(path)
    try:
        partial = staging.path / staging.target.name
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(staging.target)
    finally:
        staging.discard()
