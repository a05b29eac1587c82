"""What a server that has nothing to do says of itself."""

from __future__ import annotations

import time
from typing import Any

import httpx

PATIENCE = 30.0  # seconds
BUSY = ("running", "waiting", "pending", "kv_blocks_used")


def status(url: str, key: str | None = None) -> dict[str, Any]:
    """Return `/v1/status`."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = httpx.get(f"{url}/v1/status", headers=headers, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check_idle(url: str, key: str | None = None) -> None:
    """Fail unless the server runs nothing and holds no blocks, soon after its last client has left.

    A client that leaves is noticed after it has left, so the server is asked until it says so.
    """
    until = time.monotonic() + PATIENCE
    while True:
        found = status(url, key)
        models = [
            (each["running"], each["waiting"], each["pending"], each["kv_blocks_used"]) for each in found["models"]
        ]
        if found["requests_in_flight"] == 0 and all(not any(numbers) for numbers in models):
            return
        assert time.monotonic() < until, f"the server is not idle: {found}"
