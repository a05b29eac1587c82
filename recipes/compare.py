"""`inferencex compare`: quality, size and speed of bundles beside those of a reference bundle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from inferencex.cli.console import DebugOption, run_app, stderr_console
from inferencex.formats.errors import OptionError
from inferencex.recipes.comparison.output import size_of, write_comparison
from inferencex.recipes.comparison.rows import Row, cells
from inferencex.recipes.comparison.speed import measure_speed
from inferencex.recipes.windows import builtin_text, windows_of
from inferencex.runtime.backends import select_backend
from inferencex.runtime.backends.base import Executable
from inferencex.runtime.backends.divergence import (
    Divergence,
    log_softmax,
    whole_sequence_logits,
    whole_sequence_options,
)
from inferencex.runtime.text import Tokenizer

if TYPE_CHECKING:
    from inferencex.recipes.evaluation.recipe import EvaluationRecipe

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Summary:
    """Figures of one bundle against the reference; KL in nats per token, `same_top1` a share."""

    bundle: str
    tokens: int
    mean_kl: float
    p99_kl: float
    same_top1: float
    perplexity: float


def log_probabilities(executable: Executable, token_ids: Sequence[int]) -> NDArray[np.float64]:
    """Run one sequence alone and return its log probabilities, float64 `[T, vocab]`."""
    return log_softmax(whole_sequence_logits(executable, token_ids))


def compare(
    reference: Path,
    bundles: Sequence[Path],
    text: str,
    *,
    windows: int,
    length: int,
    backend: str = "auto",
    activation_dtype: str = "auto",
    kv_cache_dtype: str = "auto",
) -> list[Summary]:
    """Compare bundles with a reference bundle over windows of a text, and the reference with itself first.

    The reference runs on float32 activations, keys and values; the others as asked, so that a bundle compared with
    itself shows what quantizing those costs.

    Raises OptionError when the text is shorter than one window, BundleError for a bundle that cannot be loaded.
    """
    paths = [reference, *bundles]
    token_ids = Tokenizer.load(reference).encode(text)
    if len(token_ids) < length:
        raise OptionError(
            f"the text has {len(token_ids)} tokens, less than one window of {length}; give --length or --text"
        )
    asked = whole_sequence_options(length, activation_dtype, kv_cache_dtype)
    exact = whole_sequence_options(length, "float32", "float32")
    executables = [
        select_backend(backend, path).compile(path, options)
        for path, options in zip(paths, [exact, *[asked] * len(bundles)], strict=True)
    ]
    divergences = [Divergence() for _ in paths]
    for window in windows_of(token_ids, length, windows):
        wanted = whole_sequence_logits(executables[0], window).copy()
        divergences[0].add(wanted, wanted, window)
        for executable, divergence in zip(executables[1:], divergences[1:], strict=True):
            divergence.add(wanted, whole_sequence_logits(executable, window), window)
    return [_summary(path, divergence) for path, divergence in zip(paths, divergences, strict=True)]


def _summary(path: Path, divergence: Divergence) -> Summary:
    figures = divergence.summary()
    return Summary(str(path), figures.tokens, figures.mean_kl, figures.p99_kl, figures.same_top1, figures.perplexity)


@app.command()
def run(
    context: typer.Context,
    reference: Annotated[Path, typer.Argument(help="The bundle to compare with.")],
    bundles: Annotated[list[Path], typer.Argument(help="The bundles to compare.")],
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Measure what an evaluation recipe says, its tasks included.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="With a recipe: most questions of a task, most windows of a text.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text. Default: Python's language reference.")] = None,
    windows: Annotated[int, typer.Option(help="Windows of the text to use.", min=1)] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a window.", min=2)] = 512,
    backend: Annotated[str, typer.Option(help="Backend that runs the bundles.")] = "auto",
    activation_dtype: Annotated[
        str, typer.Option(help="How linears with INT4 and INT8 weights read activations: auto, int8, float32.")
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="How keys and values are kept: auto, float32, float16, bfloat16, int8, fp8.")
    ] = "auto",
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Measure tokens per second, too.")] = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for results.json, results.md and plots (SVG).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    debug: DebugOption = False,
) -> None:
    """Compare bundles with a reference bundle: quality, size and speed.

    Quality is KL divergence, agreement on the most likely token and perplexity on a text, or what a recipe measures.
    The reference runs on float32 activations. A bundle compared with itself shows what INT8 activations cost.
    """
    if output is not None and output.exists() and not output.is_dir():
        raise OptionError(f"--output {output}: is a file; give a folder")
    run_as: tuple[str, str, str, int | None] = (backend, activation_dtype, kv_cache_dtype, None)
    if recipe is not None:
        _refuse_beside_a_recipe(context)
        asked = _recipe(recipe)
        rows = _by_recipe(asked, reference, bundles, limit)
        engine = asked.engine
        run_as = (engine.backend, engine.activation_dtype, engine.kv_cache_dtype, engine.threads)
    else:
        if limit is not None:
            raise OptionError("--limit is about a recipe's questions; give --recipe, or --windows for the text")
        stderr_console().print(f"{len(bundles) + 1} bundles, up to {windows} windows of {length} tokens ...")
        summaries = compare(
            reference,
            bundles,
            _text(text),
            windows=windows,
            length=length,
            backend=backend,
            activation_dtype=activation_dtype,
            kv_cache_dtype=kv_cache_dtype,
        )
        rows = [Row(size_bytes=size_of(Path(summary.bundle)), **asdict(summary)) for summary in summaries]
    if speed:
        rows = _with_speed(rows, *run_as)
    if output is not None:
        write_comparison(rows, output)
    if as_json:
        typer.echo(json.dumps([row.to_json() for row in rows], indent=1))
        return
    header, lines = cells(rows)
    table = Table(*header)
    for line in lines:
        table.add_row(*line)
    Console(highlight=False, width=None if Console().is_terminal else 160).print(table)


def _text(path: Path | None) -> str:
    try:
        return path.read_text(encoding="utf-8") if path is not None else builtin_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--text {path}: cannot be read as UTF-8 text: {error}") from error


def _refuse_beside_a_recipe(context: typer.Context) -> None:
    """Raise OptionError for an option that says what a recipe says itself."""
    for name in ("text", "windows", "length", "backend", "activation_dtype", "kv_cache_dtype"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise OptionError(
                f"{option} is not for comparing with --recipe, which says that itself; leave one of them out"
            )


def _recipe(name: str) -> EvaluationRecipe:
    from inferencex.recipes.evaluation.recipe import load_recipe
    from inferencex.recipes.shipped import recipe_file

    return load_recipe(recipe_file(name))


def _by_recipe(recipe: EvaluationRecipe, reference: Path, bundles: Sequence[Path], limit: int | None) -> list[Row]:
    from inferencex.recipes.comparison.by_recipe import compare_by_recipe
    from inferencex.recipes.evaluation.progress import watcher

    with watcher(stderr_console()) as seen:
        return compare_by_recipe(recipe, reference, bundles, limit, seen)


def _with_speed(
    rows: Sequence[Row], backend: str, activation_dtype: str, kv_cache_dtype: str, threads: int | None
) -> list[Row]:
    measured = []
    for row in rows:
        stderr_console().print(f"speed of {row.bundle} ...", markup=False)
        speed = measure_speed(
            Path(row.bundle),
            backend=backend,
            activation_dtype=activation_dtype,
            kv_cache_dtype=kv_cache_dtype,
            threads=threads,
        )
        measured.append(replace(row, speed=speed))
    return measured


def main() -> None:
    """Run `inferencex compare`."""
    run_app(app, "inferencex compare")
