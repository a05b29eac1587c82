"""`SHA256SUMS`: the hashes of all files of a folder, in the form that `sha256sum -c` reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from inferencex.formats.errors import BundleError
from inferencex.recipes.pipeline.hashing import file_digest, visible_files

SUMS_FILE = "SHA256SUMS"
SIGNATURE_FILE = "SHA256SUMS.minisig"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")
_MAX_SIZE = 16 << 20
_SHOWN = 8


def checksums_text(digests: Mapping[str, str]) -> str:
    """Return the file's text, in the order of the names."""
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))


def write_checksums(folder: Path) -> Path:
    """Write the hashes of all visible files of a folder but the checksums themselves; returns the file."""
    digests = {
        path.relative_to(folder).as_posix(): file_digest(path)
        for path in visible_files(folder)
        if path.relative_to(folder).as_posix() not in (SUMS_FILE, SIGNATURE_FILE)
    }
    path = folder / SUMS_FILE
    path.write_text(checksums_text(digests), encoding="utf-8")
    return path


def parse_checksums(data: bytes, where: str) -> dict[str, str]:
    """Read the file; raises BundleError naming the line that is wrong."""
    if len(data) > _MAX_SIZE:
        raise BundleError(f"{where}: {len(data)} bytes, the limit is {_MAX_SIZE}")
    digests: dict[str, str] = {}
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError as error:
        raise BundleError(f"{where}: is not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise BundleError(f"{where}:{number}: expected a sha256, two spaces and a file, found {line[:80]!r}")
        digest, name = match.groups()
        if name.startswith("/") or ".." in name.split("/") or name in digests:
            raise BundleError(f"{where}:{number}: {name[:80]!r} leads out of the folder, or is listed twice")
        digests[name] = digest
    return digests


def check_files(folder: Path, digests: Mapping[str, str], listed_in: str, *, complete: bool) -> None:
    """Compare the files of a folder with their hashes.

    complete:  whether files that are not listed are an error, as what was added is as bad as what was changed

    Raises BundleError naming what is missing, damaged or not listed.
    """
    wrong = []
    for name, digest in sorted(digests.items()):
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif (found := file_digest(path)) != digest:
            wrong.append(f"{name} has the sha256 {found[:12]}..., expected {digest[:12]}...")
    if complete:
        present = {path.relative_to(folder).as_posix() for path in visible_files(folder)}
        extra = sorted(present - set(digests) - {SUMS_FILE, SIGNATURE_FILE})
        wrong += [f"{name} is not listed" for name in extra]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise BundleError(
            f"{folder}: {len(wrong)} of its files are not as {listed_in} says: {'; '.join(wrong[:_SHOWN])}{more}; "
            "copy it again from where it was published"
        )
