"""Signatures of checksum files in minisign's form (Ed25519), so that the tool `minisign` checks them as well."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferencex.formats.errors import BundleError, OptionError

_KEY_LIMIT = 64 << 10
COMMENT = "inferencex: checksums of a bundle"


def new_key(secret: Path, password: str) -> str:
    """Write a new pair of keys, FILE and FILE.pub, and return the public key's text.

    With an empty password the secret key is stored as it is, for machines. Raises OptionError for a file that exists.
    """
    minisign = _library()
    public = secret.with_name(secret.name + ".pub")
    for path in (secret, public):
        if path.exists():
            raise OptionError(f"{path}: exists; name another file for the new key")
    pair = minisign.KeyPair.generate()
    if password:
        pair.secret_key.encrypt(password)
    with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
        handle.write(bytes(pair.secret_key))
    public.write_bytes(bytes(pair.public_key))
    return pair.public_key.to_base64().decode()  # type: ignore[no-any-return]


def sign_file(path: Path, secret: Path, signature: Path, password: Callable[[], str] | None = None) -> None:
    """Sign a file; `password` is asked when the key has one. Raises OptionError for a key that cannot be used.

    The signature says nothing of when it was made, so that equal files get equal signatures.
    """
    minisign = _library()
    key = _read(minisign, minisign.SecretKey.from_bytes, secret, "secret key")
    if key.is_encrypted():
        if password is None:
            raise OptionError(f"{secret}: the key has a password, which cannot be asked for here; use one without")
        try:
            key.decrypt(password())
        except minisign.Error as error:
            raise OptionError(f"{secret}: the password is not that of the key: {error}") from error
    made = key.sign(path.read_bytes(), untrusted_comment=COMMENT, trusted_comment=f"file:{path.name}")
    signature.write_bytes(bytes(made))


def check_signature(path: Path, signature: Path, public_key: str) -> None:
    """Check a file's signature against a public key: its text, or the file that holds it.

    Raises OptionError for a key that is none, BundleError for a signature that is missing, unreadable or not of this
    file by this key.
    """
    minisign = _library()
    if Path(public_key).is_file():
        key = _read(minisign, minisign.PublicKey.from_bytes, Path(public_key), "public key")
    else:
        try:
            key = minisign.PublicKey.from_base64(public_key)
        except (minisign.Error, ValueError) as error:
            raise OptionError(
                f"--public-key {public_key[:80]}: is neither a file nor a public key of minisign, such as RWQ..."
            ) from error
    if not signature.is_file():
        raise BundleError(
            f"{signature}: is missing, so that nothing says who made {path.name}; get it, or leave out --public-key"
        )
    try:
        found = minisign.Signature.from_bytes(signature.read_bytes()[:_KEY_LIMIT])
    except (minisign.Error, ValueError) as error:
        raise BundleError(f"{signature}: is not a signature of minisign: {error}") from error
    try:
        key.verify(path.read_bytes(), found)
    except minisign.Error as error:
        raise BundleError(
            f"{path}: {signature.name} is not a signature of this file by this key ({error}); do not trust it"
        ) from error


def public_key_of(secret: Path) -> str:
    """Return the public key that belongs to a secret key without a password."""
    minisign = _library()
    key = _read(minisign, minisign.SecretKey.from_bytes, secret, "secret key")
    if key.is_encrypted():
        raise OptionError(f"{secret}: the key has a password, which cannot be asked for here; use one without")
    return str(key.get_public_key().to_base64().decode())


def _read(minisign: Any, parse: Callable[[bytes], Any], path: Path, what: str) -> Any:
    try:
        return parse(path.read_bytes()[:_KEY_LIMIT])
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (minisign.Error, ValueError) as error:
        raise OptionError(f"{path}: is not a {what} of minisign: {error}") from error


def _library() -> Any:
    """Return the package py-minisign, which comes with the extra `sign`."""
    try:
        import minisign
    except ModuleNotFoundError as error:
        raise OptionError("signatures need the package py-minisign; run: pip install 'inferencex[sign]'") from error
    return minisign
