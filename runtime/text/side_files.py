"""Reading the small JSON files that a bundle carries beside its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inferencex.formats.errors import BundleError

TOKENIZER_FILE = "tokenizer.json"


def read_text(path: Path) -> str:
    """Return the UTF-8 text of `path`; raise BundleError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: cannot be read as UTF-8 text ({error}); convert the model again") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one when there is no such file.

    Raises BundleError when the file holds anything but one JSON object.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise BundleError(f"{path}: is not valid JSON ({error}); convert the model again") from error
    if not isinstance(value, dict):
        raise BundleError(f"{path}: holds a JSON {type(value).__name__}, expected an object; convert the model again")
    return value
