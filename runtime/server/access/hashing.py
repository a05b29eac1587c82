"""Keys as they are stored: plain, or as a hash that cannot be turned back.

Three forms: the key itself; `sha256:<64 hex digits>`, the hash of the key; `sha256:<salt>:<64 hex digits>`, the hash of
the salt's bytes followed by the key, with a salt of 8 to 64 bytes in hex. Keys are long and random, so a fast hash is
enough: there is no dictionary to try. That is why short keys are refused.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from hmac import compare_digest

from inferencex.formats.errors import OptionError

MIN_KEY_LENGTH = 8  # characters; generated keys have 43
MAX_KEY_LENGTH = 512
_KEY = re.compile(r"[\x21-\x7e]+")
_HASHED = re.compile(r"sha256:(?:(?P<salt>(?:[0-9a-fA-F]{2}){8,64}):)?(?P<digest>[0-9a-fA-F]{64})")


@dataclass(frozen=True)
class StoredKey:
    """What is kept of a key: enough to recognize it, not enough to use it."""

    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)

    def matches(self, key: bytes) -> bool:
        """Return whether this is the key, in a time that does not depend on how alike they are."""
        return compare_digest(hashlib.sha256(self.salt + key).digest(), self.digest)


def parse_key(text: str) -> StoredKey:
    """Read a key in one of its three forms; a plain one is hashed at once.

    Raises OptionError, without showing the text, for one that is none of the three.
    """
    if text.startswith("sha256:"):
        match = _HASHED.fullmatch(text)
        if match is None:
            raise OptionError(
                "a hashed key is not sha256:<64 hex digits> or sha256:<salt in hex>:<64 hex digits>; "
                "`inferencex serve --hash-key` makes one"
            )
        return StoredKey(bytes.fromhex(match["salt"] or ""), bytes.fromhex(match["digest"]))
    check_plain_key(text)
    salt = secrets.token_bytes(16)
    return StoredKey(salt, hashlib.sha256(salt + text.encode()).digest())


def check_plain_key(text: str) -> None:
    """Raise OptionError, without showing the key, for one that no client could send or anyone could guess."""
    if _KEY.fullmatch(text) is None:
        raise OptionError("a key has to be printable ASCII without spaces")
    if not MIN_KEY_LENGTH <= len(text) <= MAX_KEY_LENGTH:
        raise OptionError(
            f"a key of {len(text)} characters; {MIN_KEY_LENGTH} to {MAX_KEY_LENGTH} are expected "
            "(`inferencex serve --generate-key` makes one)"
        )


def hash_key(key: str) -> str:
    """Return the salted form of a key, as a configuration keeps it. Raises OptionError for an unusable key."""
    check_plain_key(key)
    salt = secrets.token_bytes(16)
    return f"sha256:{salt.hex()}:{hashlib.sha256(salt + key.encode()).hexdigest()}"


def generate_key() -> str:
    """Return a new key of 256 random bits."""
    return f"ix-{secrets.token_urlsafe(32)}"
