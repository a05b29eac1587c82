from __future__ import annotations

import hashlib

import pytest

from inferencex.formats.errors import OptionError
from inferencex.runtime.server.access.hashing import generate_key, hash_key, parse_key


def test_all_three_forms_know_the_key_and_no_other() -> None:
    key = generate_key()
    plain_hash = f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    for stored in (
        parse_key(key),
        parse_key(plain_hash),
        parse_key(hash_key(key)),
        parse_key(plain_hash.upper().replace("SHA256", "sha256")),
    ):
        assert stored.matches(key.encode())
        assert not stored.matches(key.encode() + b"x")
        assert not stored.matches(b"")
        assert key not in repr(stored) and stored.digest.hex() not in repr(stored)


def test_salts_and_keys_are_different_each_time() -> None:
    assert hash_key("the-same-key") != hash_key("the-same-key")
    assert generate_key() != generate_key()


@pytest.mark.parametrize(
    "text", ["", "short", "a key with spaces", "tab\tabcdefgh", "x" * 513, "sha256:", "sha256:12:34"]
)
def test_unusable_keys_are_refused_without_being_shown(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_key(text)
    assert not text or text not in str(caught.value).replace("sha256:<", "")
