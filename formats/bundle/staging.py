"""The folder a bundle is written in before it takes its place: beside it, hidden, gone if anything fails."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from inferencex.formats.bundle.layout import MANIFEST_FILE, MAX_MANIFEST_SIZE, REPORT_FILES
from inferencex.formats.bundle.manifest import parse_manifest
from inferencex.formats.errors import BundleError

_SHOWN_FILES = 5


def check_destination(path: Path, *, overwrite: bool, source: Path | None = None) -> None:
    """Refuse, before any work, a destination that must not be written; raises BundleError.

    Only an absent path, an empty folder, or (with `overwrite`) a bundle without foreign files may be written, and
    never the source of the weights, a folder that contains it, nor one inside it.
    """
    target = path.resolve()
    if source is not None and source.resolve().is_relative_to(target):
        raise BundleError(f"{path}: this is where the source's files are ({source}); choose another output folder")
    if source is not None and source.is_dir() and target.is_relative_to(source.resolve()):
        raise BundleError(f"{path}: lies inside the source ({source}); choose an output folder outside of it")
    if path.is_symlink():
        raise BundleError(f"{path}: is a symbolic link; give the folder it points to, or another output folder")
    if not path.exists():
        return
    if not path.is_dir():
        raise BundleError(f"{path}: exists and is not a folder; choose another output folder")
    foreign = list(islice(_files_beside(path, _bundle_files(path)), _SHOWN_FILES + 1))
    if foreign:
        raise BundleError(
            f"{path}: holds files that are not a bundle's: {', '.join(foreign[:_SHOWN_FILES])}"
            f"{', ...' if len(foreign) > _SHOWN_FILES else ''}; move them or choose another output folder"
        )
    if not overwrite and (path / MANIFEST_FILE).exists():
        raise BundleError(f"{path}: already holds a bundle; pass --overwrite to replace it, or choose another folder")


def _files_beside(path: Path, known: set[str]) -> Iterator[str]:
    """Yield, folder by folder, the files under `path` that are not `known`; raises BundleError for a closed folder."""

    def fail(error: OSError) -> None:
        raise BundleError(f"{error.filename}: cannot be looked into ({error.strerror}); choose another output folder")

    for folder, folders, files in os.walk(path, onerror=fail):
        folders.sort()
        for name in sorted(files):
            relative = str(Path(folder, name).relative_to(path))
            if relative not in known:
                yield relative


def _bundle_files(path: Path) -> set[str]:
    """Return the files of `path` that belong to the bundle there; none if there is no readable bundle."""
    manifest_path = path / MANIFEST_FILE
    if not manifest_path.is_file() or manifest_path.stat().st_size > MAX_MANIFEST_SIZE:
        return set()
    try:
        manifest = parse_manifest(manifest_path.read_bytes())
    except BundleError:
        # Whatever this is, it is not known to be ours, so it is not ours to delete.
        return set()
    return {MANIFEST_FILE, *REPORT_FILES, *manifest.files}


def check_disk_space(path: Path, nbytes: int) -> None:
    """Refuse to start writing `nbytes` for the bundle `path` where they do not fit; raises BundleError."""
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise BundleError(
            f"{path}: the bundle needs {nbytes / 2**20:.0f} MiB and {folder} has {free / 2**20:.0f} MiB free; "
            "free some space or choose another output folder"
        )


class Staging:
    """A locked, hidden folder beside `target`; `commit` makes it `target`, `discard` removes it.

    The lock is the kernel's (flock on the folder) and dies with the process. Whoever stages the same target next
    removes the folders that nobody holds, and puts back a bundle whose replacement was cut in half.
    """

    def __init__(self, target: Path) -> None:
        self.target = Path(os.path.abspath(target))
        parent, name = self.target.parent, self.target.name
        if not name:
            raise BundleError(f"{target}: is not a path a bundle can be written to")
        parent.mkdir(parents=True, exist_ok=True)
        _recover(self.target)
        self._old = parent / f".{name}.replaced-{secrets.token_hex(4)}"
        self.path = parent / f".{name}.partial-{secrets.token_hex(4)}"
        self.path.mkdir()
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if not self.path.exists():
            os.close(self._lock)
            raise BundleError(f"{self.path}: another conversion to {target} removed it while starting; try again")

    def commit(self) -> None:
        """Make everything durable and take the target's place; the old bundle is gone only after that."""
        for folder, _, files in os.walk(self.path):
            for file in files:
                _sync(Path(folder, file))
            _sync(Path(folder))
        replacing = self.target.exists() and any(self.target.iterdir())
        if replacing:
            self.target.rename(self._old)
        try:
            self.path.rename(self.target)
        except OSError:
            if replacing:
                self._old.rename(self.target)
            raise
        _sync(self.target.parent)
        os.close(self._lock)
        if replacing:
            # The new bundle is in place; what resists removal now goes with the next conversion to this target.
            shutil.rmtree(self._old, ignore_errors=True)

    def discard(self) -> None:
        """Remove the folder and all that was written."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Give a hidden folder beside `target` for what is needed only while `target` is made.

    What a killed process leaves of it goes when the same target is written next.
    """
    staging = Staging(target)
    try:
        yield staging.path
    finally:
        staging.discard()


def _recover(target: Path) -> None:
    """Clean up after killed runs that wrote the same target."""
    for old in sorted(target.parent.glob(f".{_literal(target.name)}.replaced-*")):
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)
    for partial in sorted(target.parent.glob(f".{_literal(target.name)}.partial-*")):
        try:
            lock = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:
            continue  # its process has removed it just now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(partial)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _literal(name: str) -> str:
    """Return `name` with the characters that mean something to glob quoted."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
