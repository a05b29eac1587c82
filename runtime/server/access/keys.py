"""Whose key a request carries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inferencex.runtime.server.access.hashing import MAX_KEY_LENGTH, StoredKey
from inferencex.runtime.server.calls import ANONYMOUS, Caller
from inferencex.runtime.server.errors import NotAuthenticated


@dataclass(frozen=True)
class KeyEntry:
    """A key, and who asks with it."""

    stored: StoredKey
    caller: Caller


class KeyStore:
    """All keys of a server.

    Without any key that is not an administrator's the server is open: whoever sends none, or one that is unknown, is
    `ANONYMOUS`, because clients of OpenAI's API always send some key. An administrator's key is known in either case.
    """

    def __init__(self, entries: Iterable[KeyEntry] = ()) -> None:
        self._entries = tuple(entries)
        self.required = any(not entry.caller.is_admin for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def authenticate(self, authorization: str | None) -> Caller:
        """Return who sends this `Authorization` header (`Bearer <key>`), None for no header.

        Every key is compared, whether or not one before it is equal, so that the time taken tells nothing.
        Raises NotAuthenticated; its message never has the key in it.
        """
        key = bearer_key(authorization)
        found: Caller | None = None
        if key is not None:
            presented = key.encode("utf-8", "surrogateescape")
            for entry in self._entries:
                if entry.stored.matches(presented):
                    found = entry.caller
        if found is not None:
            return found
        if not self.required:
            return ANONYMOUS
        if authorization is None:
            raise NotAuthenticated("no API key was given; send it in the header: Authorization: Bearer <key>")
        if key is None:
            raise NotAuthenticated("the header Authorization is not of the form: Bearer <key>")
        raise NotAuthenticated("the API key is not known to this server")


def bearer_key(authorization: str | None) -> str | None:
    """Return the key of an `Authorization` header; None where there is none, or it is not of that form."""
    if authorization is None:
        return None
    scheme, _, key = authorization.strip().partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key or len(key) > MAX_KEY_LENGTH:
        return None
    return key
