"""Questions from local files, in the form that the task's dataset on the hub has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inferencex.formats.errors import RecipeError

Row = dict[str, Any]

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def read_docs(task: str, path: Path, labels: Path | None = None) -> list[Row]:
    """Return the questions of a JSON Lines file (or a JSON list) as rows of the task's dataset.

    ARC's questions may also be `{"query": "Question: ...", "choices": [...], "gold": 0}`, and PIQA's labels may be in
    a file of their own. Raises RecipeError naming file and line.
    """
    rows = _rows(path)
    if labels is not None:
        values = _text(labels).split()
        if len(values) != len(rows):
            raise RecipeError(f"{labels}: has {len(values)} labels for the {len(rows)} questions of {path}")
        rows = [{**row, "label": _label(labels, number, value)} for number, (row, value) in _paired(rows, values)]
    form = next((form for prefix, form in _FORMS.items() if task.startswith(prefix)), None)
    if form is None:
        return rows
    return [_formed(form, row, path, number) for number, row in enumerate(rows, 1)]


def _paired(rows: Sequence[Row], values: Sequence[str]) -> enumerate[tuple[Row, str]]:
    return enumerate(zip(rows, values, strict=True), 1)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _label(path: Path, number: int, value: str) -> int:
    if not value.isdecimal():
        raise RecipeError(f"{path}:{number}: the label is {value!r}; expected the index of the right choice")
    return int(value)


def _rows(path: Path) -> list[Row]:
    text = _text(path)
    try:
        if text.lstrip().startswith("["):
            found = list(enumerate(json.loads(text), 1))
        else:
            lines = enumerate(text.splitlines(), 1)
            found = [(number, _parsed(line, path, number)) for number, line in lines if line.strip()]
    except ValueError as error:
        raise RecipeError(f"{path}: is not JSON: {error}") from error
    for number, row in found:
        if not isinstance(row, dict):
            raise RecipeError(f"{path}:{number}: is a {type(row).__name__}; expected an object, one a line")
    if not found:
        raise RecipeError(f"{path}: holds no questions")
    return [row for _, row in found]


def _parsed(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise RecipeError(f"{path}:{number}: is not JSON: {error}") from error


def _formed(form: Callable[[Row], Row], row: Row, path: Path, number: int) -> Row:
    try:
        return form(row)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        found = ", ".join(row)
        raise RecipeError(
            f"{path}: question {number} has the fields {found}, and {error} is missing or wrong"
        ) from error


def _arc(row: Row) -> Row:
    if "query" not in row:
        return {"question": row["question"], "choices": row["choices"], "answerKey": row["answerKey"]}
    letters = list(_LETTERS[: len(row["choices"])])
    return {
        "question": row["query"].removeprefix("Question: "),
        "choices": {"text": row["choices"], "label": letters},
        "answerKey": letters[row["gold"]],
    }


def _piqa(row: Row) -> Row:
    return {name: row[name] for name in ("goal", "sol1", "sol2", "label")}


def _only(*names: str) -> Callable[[Row], Row]:
    return lambda row: {name: row[name] for name in names}


_FORMS: Mapping[str, Callable[[Row], Row]] = {
    "arc_": _arc,
    "piqa": _piqa,
    "lambada": _only("text"),
    "gsm8k": _only("question", "answer"),
}
