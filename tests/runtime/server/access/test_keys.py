from __future__ import annotations

from typing import Any

import pytest

from inferencex.runtime.server.access.hashing import StoredKey, parse_key
from inferencex.runtime.server.access.keys import KeyEntry, KeyStore
from inferencex.runtime.server.calls import ANONYMOUS, Caller
from inferencex.runtime.server.errors import NotAuthenticated

ALICE, BOB, ROOT = Caller("alice"), Caller("bob"), Caller("root", is_admin=True)


def store(*entries: tuple[str, Caller]) -> KeyStore:
    return KeyStore(KeyEntry(parse_key(key), caller) for key, caller in entries)


def test_each_key_has_its_caller() -> None:
    keys = store(("key-of-alice", ALICE), ("key-of-bob", BOB), ("key-of-root", ROOT))
    assert keys.authenticate("Bearer key-of-alice") is ALICE
    assert keys.authenticate("bearer  key-of-bob ") is BOB
    assert keys.authenticate("Bearer key-of-root") is ROOT


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic key-of-alice", "key-of-alice", "Bearer key-of-alicf", "Bearer \udcff"],
)
def test_anything_else_is_refused_and_not_repeated(header: str | None) -> None:
    keys = store(("key-of-alice", ALICE))
    with pytest.raises(NotAuthenticated) as caught:
        keys.authenticate(header)
    assert caught.value.status == 401 and caught.value.code == "invalid_api_key"
    assert "alic" not in str(caught.value)


def test_without_keys_any_key_will_do() -> None:
    for keys in (store(), store(("key-of-root", ROOT))):
        assert not keys.required
        assert keys.authenticate(None) is ANONYMOUS
        assert keys.authenticate("Bearer EMPTY") is ANONYMOUS
    assert store(("key-of-root", ROOT)).authenticate("Bearer key-of-root") is ROOT


def test_every_key_is_compared_whatever_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[StoredKey] = []
    matches = StoredKey.matches

    def counting(self: StoredKey, key: bytes) -> Any:
        compared.append(self)
        return matches(self, key)

    keys = store(("key-of-alice", ALICE), ("key-of-bob", BOB), ("key-of-root", ROOT))
    monkeypatch.setattr(StoredKey, "matches", counting)
    keys.authenticate("Bearer key-of-alice")
    assert len(compared) == 3
    with pytest.raises(NotAuthenticated):
        keys.authenticate("Bearer nobody-at-all")
    assert len(compared) == 6
