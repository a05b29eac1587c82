"""Texts that bundles are measured on: built in, from a file, or from a dataset on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inferencex.formats.errors import RecipeError
from inferencex.recipes.evaluation.recipe import TextMeasure
from inferencex.recipes.windows import builtin_text, windows_of
from inferencex.runtime.text import Tokenizer

_CHARACTERS_A_TOKEN = 8  # more than any tokenizer needs for prose: so much of a dataset is read at most


def windows(measure: TextMeasure, section: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the windows of a text as token ids.

    Raises RecipeError when the text cannot be had, or is shorter than one window.
    """
    most = measure.windows * measure.length * _CHARACTERS_A_TOKEN
    ids = tokenizer.encode(_text(measure, section, most))
    found = [list(window) for window in windows_of(ids, measure.length, measure.windows)]
    if not found:
        raise RecipeError(
            f"{section}.text: {measure.text} has {len(ids)} tokens, less than one window of {measure.length}; "
            "give a longer text or a smaller length"
        )
    return found


def _text(measure: TextMeasure, section: str, most: int) -> str:
    if measure.text == "builtin":
        return builtin_text()
    path = Path(measure.text)
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{section}.text: {path} cannot be read as UTF-8 text: {error}") from error
    return _hub_text(measure, section, most)


def _hub_text(measure: TextMeasure, section: str, most: int) -> str:
    import datasets

    name, config, split = (*measure.text.split(":"), None, None)[:3]
    failed = f"{section}.text: there is no file {measure.text}, and as a dataset it cannot be read"
    try:
        rows: Any = datasets.load_dataset(name, config or None, split=split or "test")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RecipeError(f"{failed}: {line}") from error
    if measure.column not in rows.column_names:
        raise RecipeError(f"{section}.column: {measure.text} has {', '.join(rows.column_names)}, not {measure.column}")
    parts: list[str] = []
    length = 0
    for row in rows:
        parts.append(str(row[measure.column]))
        length += len(parts[-1]) + 1
        if length > most:
            break
    return "\n".join(parts)
