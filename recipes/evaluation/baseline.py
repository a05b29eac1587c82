"""What a bundle is compared with: another bundle, the checkpoint it was made from, or results that were stored."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from inferencex.formats.errors import OptionError
from inferencex.recipes.evaluation.progress import Watcher
from inferencex.recipes.evaluation.results import RESULTS_FILE, Evaluation, read_evaluation

MANIFEST = "bundle.json"


@dataclass(frozen=True)
class Baseline:
    """A model to run beside, results to compare with, or both.

    name:   as it was given
    bundle: runs with the bundle that is evaluated
    stored: found by an earlier evaluation
    """

    name: str
    bundle: Path | None = None
    stored: Evaluation | None = None


@contextmanager
def open_baseline(given: Sequence[str], watcher: Watcher) -> Iterator[Baseline | None]:
    """Yield the baseline that `given` names: at most one model and at most one results.json.

    A checkpoint is converted without quantization into a folder that is removed at the end. Raises OptionError when
    several of a kind are given, or a checkpoint is and the converter is not installed.
    """
    stored = [name for name in given if _results_file(name) is not None]
    models = [name for name in given if _results_file(name) is None]
    if len(stored) > 1 or len(models) > 1:
        raise OptionError(f"--baseline {', '.join(given)}: give one model, one results.json, or one of each")
    if not given:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="inferencex-baseline-") as folder:
        results = _results_file(stored[0]) if stored else None
        yield Baseline(
            name=models[0] if models else stored[0],
            bundle=_bundle(models[0], Path(folder) / "baseline", watcher) if models else None,
            stored=None if results is None else read_evaluation(results),
        )


def _results_file(name: str) -> Path | None:
    path = Path(name)
    if path.suffix == ".json":
        return path
    inside = path / RESULTS_FILE
    return inside if inside.is_file() and not (path / MANIFEST).exists() else None


def _bundle(name: str, output: Path, watcher: Watcher) -> Path:
    path = Path(name)
    if (path / MANIFEST).is_file():
        return path
    try:
        from inferencex.convert.pipeline import ConvertOptions, convert
        from inferencex.convert.quantize import parse_scheme
        from inferencex.convert.stages import Silent
    except ModuleNotFoundError as error:
        raise OptionError(
            f"--baseline {name}: is no bundle, and converting it needs the package {error.name}; install "
            "inferencex[convert], or give a bundle"
        ) from error
    watcher.note(f"converting {name} without quantization, to compare with")
    convert(ConvertOptions(name, output, parse_scheme("none")), Silent())
    return output
