"""Whether a bundle, or a published folder, is what it was when it was made."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from inferencex.formats.bundle import Bundle
from inferencex.formats.bundle.layout import MANIFEST_FILE
from inferencex.formats.errors import BundleError
from inferencex.recipes.pipeline.hashing import file_digest
from inferencex.recipes.provenance.checksums import SIGNATURE_FILE, SUMS_FILE, check_files, parse_checksums
from inferencex.recipes.provenance.signing import check_signature
from inferencex.recipes.provenance.statement import STATEMENT_FILE


@dataclass(frozen=True)
class Verified:
    """What was checked, in words; `doubts` is what could not be."""

    checks: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def verify(folder: Path, *, signature: Path | None = None, public_key: str | None = None) -> Verified:
    """Check all hashes and, given a public key, who signed them.

    The signature comes first: nothing of a folder is believed before it. Raises BundleError saying what does not fit.
    """
    result = Verified()
    sums = folder / SUMS_FILE
    if not folder.is_dir():
        raise BundleError(f"{folder}: is not a folder")
    if not sums.is_file() and not (folder / MANIFEST_FILE).is_file():
        raise BundleError(
            f"{folder}: holds neither {MANIFEST_FILE} nor {SUMS_FILE}, so there is nothing to check it by"
        )
    where = signature or folder / SIGNATURE_FILE
    if public_key is not None:
        if not sums.is_file():
            raise BundleError(f"{folder}: holds no {SUMS_FILE}, which is what a signature is of; sign it first")
        check_signature(sums, where, public_key)
        result.checks.append(f"{where.name}: {SUMS_FILE} is signed by this key")
    elif where.is_file():
        result.doubts.append(f"{where.name} was not checked; give the signer's --public-key")
    if sums.is_file():
        digests = parse_checksums(sums.read_bytes(), str(sums))
        check_files(folder, digests, SUMS_FILE, complete=True)
        result.checks.append(f"{SUMS_FILE}: {len(digests)} files as they were")
    else:
        result.doubts.append(f"there is no {SUMS_FILE}: only what {MANIFEST_FILE} lists was checked, by itself")
    if (folder / MANIFEST_FILE).is_file():
        bundle = Bundle.open(folder, verify=True)
        result.checks.append(f"{MANIFEST_FILE}: {len(bundle.files)} files as they were, weights and graph fit")
    if (folder / STATEMENT_FILE).is_file():
        _check_statement(folder)
        result.checks.append(f"{STATEMENT_FILE}: is about these files")
    return result


def _check_statement(folder: Path) -> None:
    path = folder / STATEMENT_FILE
    try:
        subjects = json.loads(path.read_bytes())["subject"]
        digests = {str(subject["name"]): str(subject["digest"]["sha256"]) for subject in subjects}
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{path}: is not an in-toto statement: {error}") from error
    if not digests or ((folder / MANIFEST_FILE).is_file() and MANIFEST_FILE not in digests):
        raise BundleError(f"{path}: does not speak of {MANIFEST_FILE if digests else 'any file'} of this folder")
    for name, digest in digests.items():
        if ".." in Path(name).parts or not (folder / name).is_file() or file_digest(folder / name) != digest:
            raise BundleError(f"{path}: is about another {name[:80]} than the one in this folder")
