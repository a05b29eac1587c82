"""`inferencex pipeline`: convert, check, export and publish as a recipe says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inferencex.cli.console import FAILED, DebugOption
from inferencex.formats.errors import OptionError

if TYPE_CHECKING:
    from rich.table import Table

    from inferencex.recipes.pipeline.plan import Plan
    from inferencex.recipes.pipeline.schedule import StepResult

app = typer.Typer(add_completion=False)
_WIDTH_OF_LOGS = 160


def _print_schema(value: bool) -> None:
    if value:
        from inferencex.recipes.pipeline.schema import schema

        typer.echo(json.dumps(schema(), indent=1))
        raise typer.Exit()


@app.command()
def pipeline(
    recipe: Annotated[str, typer.Argument(help="The recipe: a YAML file, or the name of one that is shipped.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the steps with estimated time, memory and disk, and do nothing.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another value for something in the recipe, as key.key=value; repeatable."),
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Directory of finished steps, where a later run goes on. Default: .inferencex/NAME."),
    ] = None,
    report_dir: Annotated[
        Path | None,
        typer.Option(help="Directory for summary.md, summary.json and junit.xml. Default: report in the work dir."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Steps at once, where memory allows. Default: one for every four processors.", min=1),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster to run steps on, or auto; its machines share the work dir."),
    ] = None,
    log_format: Annotated[
        str, typer.Option(help="text, or json: one object a line on standard output, for machines.")
    ] = "text",
    print_schema: Annotated[
        bool,
        typer.Option(
            "--schema", help="Print the JSON Schema of recipes and exit.", callback=_print_schema, is_eager=True
        ),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Run a pipeline: convert, check, export and publish as a recipe says.

    What is done is not done again: each step is kept by a hash of all it was made from. Exit status 1 says that a gate
    was not passed, or a step failed.
    """
    if log_format not in ("text", "json"):
        raise OptionError(f"--log-format {log_format!r} is not one of text, json")
    from inferencex.recipes.pipeline.log import JsonLog, TextLog
    from inferencex.recipes.pipeline.run import PipelineOptions, plan, run
    from inferencex.recipes.shipped import FOLDER, recipe_file

    path = recipe_file(recipe, FOLDER / "pipelines", "RECIPE")
    options = PipelineOptions(path, tuple(settings or ()), work_dir, report_dir, jobs, ray)
    if dry_run:
        planned = plan(options)
        if log_format == "json":
            typer.echo(json.dumps(planned.to_json()))
        else:
            _show(plan_table(planned))
        return
    results = run(options, JsonLog() if log_format == "json" else TextLog())
    if log_format == "text":
        _show(summary_table(results))
    if not all(result.good for result in results):
        raise typer.Exit(FAILED)


def plan_table(planned: Plan) -> Table:
    """Return the plan as a table."""
    from rich.table import Table

    from inferencex.recipes.pipeline.log import duration

    def gib(nbytes: int | None) -> str:
        return "?" if nbytes is None else f"{nbytes / 2**30:.2f} GiB"

    def time(seconds: float | None) -> str:
        return "?" if seconds is None else duration(seconds)

    table = Table("step", "waits for", "time", "memory", "disk", title=planned.name, show_footer=True)
    for step in planned.steps:
        e = step.estimate
        took = ("finished", "", "") if step.finished else (time(e.seconds), gib(e.memory), gib(e.disk))
        table.add_row(step.id, "\n".join(step.waits_for), *took)
    footer = (f"{len(planned.steps)} steps, {planned.jobs} at once", "", time(planned.seconds), gib(planned.memory))
    for column, text in zip(table.columns, (*footer, gib(planned.disk)), strict=True):
        column.footer = text
    return table


def summary_table(results: list[StepResult]) -> Table:
    """Return what became of the steps as a table."""
    from rich.table import Table
    from rich.text import Text

    from inferencex.recipes.pipeline.summary import rows

    table = Table("step", "", "time", "")
    for row in rows(results):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _show(table: Table) -> None:
    from rich.console import Console

    Console(highlight=False, width=None if Console().is_terminal else _WIDTH_OF_LOGS).print(table)
