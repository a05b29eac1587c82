"""The resolved configuration as YAML, with where each value came from; keys are never shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inferencex.runtime.server.config.catalogue import keys, sections
from inferencex.runtime.server.config.keys_setting import ApiKey
from inferencex.runtime.server.config.load import Resolved

HIDDEN = "(hidden)"


def config_lines(resolved: Resolved) -> Iterator[str]:
    """Yield the lines of the configuration: every key, its value, and a comment that says where it is from."""
    for section in sections():
        yield f"{section}:"
        for key in keys():
            if key.section == section:
                value = getattr(getattr(resolved.settings, section), key.name)
                yield f"  {key.name}: {json.dumps(_plain(value))}  # {resolved.origins.get(key.path, 'default')}"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, ApiKey):
        shown = value.model_dump(exclude={"key"}, exclude_defaults=True)
        return {"key": HIDDEN, **shown}
    return str(value) if isinstance(value, Path) else value
