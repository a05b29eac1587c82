"""How a setting's flag is called where it is not called as its key."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """Marks a setting that has another flag than `--` and its key."""

    name: str
