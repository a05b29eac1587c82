"""`inferencex eval`: whether a bundle is still good enough, as a recipe says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from inferencex.cli.console import FAILED, DebugOption, run_app, stderr_console
from inferencex.formats.errors import OptionError
from inferencex.recipes.evaluation.baseline import open_baseline
from inferencex.recipes.evaluation.junit import junit
from inferencex.recipes.evaluation.progress import watcher
from inferencex.recipes.evaluation.recipe import load_recipe, schema
from inferencex.recipes.evaluation.report import markdown, table, verdict
from inferencex.recipes.evaluation.results import Evaluation
from inferencex.recipes.evaluation.run import evaluate
from inferencex.recipes.shipped import recipe_file

app = typer.Typer(add_completion=False)


def _print_schema(value: bool) -> None:
    if value:
        typer.echo(json.dumps(schema(), indent=1))
        raise typer.Exit()


@app.command()
def run(
    bundle: Annotated[Path, typer.Argument(help="The bundle to evaluate.")],
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="YAML recipe: a path, or the name of one that is shipped.")
    ] = "accuracy",
    baseline: Annotated[
        list[str] | None,
        typer.Option(help="Bundle, checkpoint or results.json to compare with; a model and results may be given both."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most questions of a task, and most windows of a text.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for results.json, results.md and junit.xml.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Put a value into the recipe: thresholds.max_kl=0.05")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json instead of a table.")] = False,
    print_schema: Annotated[
        bool,
        typer.Option(
            "--schema", help="Print the JSON Schema of recipes and exit.", callback=_print_schema, is_eager=True
        ),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Evaluate a bundle: perplexity, fidelity to its source, and tasks of lm-eval, with thresholds.

    The exit status is 1 when a threshold does not hold.
    """
    asked = load_recipe(recipe_file(recipe), tuple(settings or ()))
    names = list(baseline or ()) or ([asked.baseline] if asked.baseline is not None else [])
    if output is not None and output.exists() and not output.is_dir():
        raise OptionError(f"--output {output}: is a file; give a folder")
    with watcher(stderr_console()) as seen, open_baseline(names, seen) as against:
        found = evaluate(bundle, asked, baseline=against, limit=limit, watcher=seen)
    if output is not None:
        write_reports(found, output)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        console = Console(highlight=False, width=None if Console().is_terminal else 120)
        console.print(table(found))
        for line in verdict(found):
            console.print(line, markup=False, soft_wrap=True)
    if not found.passed:
        failed = sum(not check.passed for check in found.checks)
        stderr_console().print(f"{failed} of {len(found.checks)} thresholds do not hold", markup=False)
        raise typer.Exit(FAILED)


def write_reports(evaluation: Evaluation, folder: Path) -> None:
    """Write results.json, results.md and junit.xml."""
    evaluation.write(folder)
    (folder / "results.md").write_text(markdown(evaluation), encoding="utf-8")
    (folder / "junit.xml").write_text(junit(evaluation), encoding="utf-8")


def main() -> None:
    """Run `inferencex eval`."""
    run_app(app, "inferencex eval", extra="eval")
