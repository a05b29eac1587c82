"""Finding a task's definition in lm-eval, and pointing it at local files, without indexing the thousands there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from inferencex.formats.errors import RecipeError
from inferencex.recipes.evaluation.local_docs import read_docs
from inferencex.recipes.evaluation.recipe import TaskOptions


def definitions() -> Path:
    """Return the folder with lm-eval's tasks."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


def find_definition(task: str, folder: Path) -> Path | None:
    """Return the file that defines one task, looking where its name suggests first; None for groups and no task."""
    wanted = re.compile(rf"^[\"']?task[\"']?:\s*[\"']?{re.escape(task)}[\"']?\s*(#.*)?$", re.MULTILINE)
    for path in _candidates(task, folder):
        if wanted.search(path.read_text(encoding="utf-8", errors="replace")):
            return path
    return None


def _candidates(task: str, folder: Path) -> Iterator[Path]:
    """Yield files of folders that the task's name begins with, then all others; there are more than ten thousand."""
    near = [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and task.startswith(entry.name)]
    for entry in near:
        files = sorted(entry.rglob("*.yaml"))
        yield from sorted(files, key=lambda path: path.stem != task)
    for path in sorted(folder.rglob("*.yaml")):
        if not any(path.is_relative_to(entry) for entry in near):
            yield path


def local_definition(task: str, options: TaskOptions, definition: Path | None, folder: Path) -> Path:
    """Write into `folder` a task that is lm-eval's own but for its data, and return the definition's path.

    lm-eval's templates, metrics and filters stay as they are, so that scores can be compared with published ones.
    Raises RecipeError when there is no such task, or its files cannot be read.
    """
    assert options.path is not None
    if definition is None:
        raise RecipeError(f"tasks.{task}: lm-eval has no single task of that name to read {options.path} with")
    files = {"test": _written(folder / f"{task}.test.jsonl", read_docs(task, options.path, options.labels))}
    if options.fewshot_path is not None:
        files["fewshot"] = _written(folder / f"{task}.fewshot.jsonl", read_docs(task, options.fewshot_path))
    text: Mapping[str, Any] = {
        "include": str(definition),
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": "fewshot" if options.fewshot_path is not None else "test",
    }
    path = folder / f"{task}.yaml"
    path.write_text(yaml.safe_dump(dict(text)), encoding="utf-8")
    return path


def _written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)
