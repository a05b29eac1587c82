"""Which web pages may open a socket: browsers let any page try, and say in `Origin` which one it is."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit


def is_allowed(origin: str | None, host: str | None, allowed: Collection[str]) -> bool:
    """Return whether a page of `origin` may open a socket to `host`.

    Programs send no origin. Pages of this server have its host as theirs; others need to be in `allowed`, as for
    the HTTP API (CORS).
    """
    if origin is None or "*" in allowed or origin in allowed:
        return True
    return host is not None and urlsplit(origin).netloc.lower() == host.lower()
