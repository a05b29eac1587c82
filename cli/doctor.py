"""`inferencex doctor`: devices, drivers and versions, what runs where, and why something does not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferencex.cli.console import DebugOption

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    bundle: Annotated[
        Path | None, typer.Argument(help="Also say which backend would run this bundle.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show devices, drivers and versions, what runs where, and why something does not."""
    from inferencex.formats.errors import BundleError
    from inferencex.runtime.backends import automatic_backends
    from inferencex.runtime.backends.diagnosis import diagnose

    if bundle is not None and not bundle.is_dir():
        raise BundleError(f"{bundle}: is not a folder; a bundle is the folder that inferencex-convert writes")
    found = diagnose(bundle)
    runs = [finding.what for finding in found.backends if finding.is_good and finding.what in automatic_backends()]
    chosen = runs[0] if bundle is not None and runs else None
    if as_json:
        typer.echo(json.dumps({**asdict(found), "chosen": chosen}, indent=2))
        return
    console = Console(highlight=False)
    for title, findings in found.sections():
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in findings:
            style = {True: "green", False: "yellow", None: ""}[finding.is_good]
            table.add_row(finding.what, Text(finding.state, style=style))
        console.print(table)
        console.print()
    if bundle is not None:
        says = f"runs on the backend {chosen} unless another is asked for" if chosen else "runs on no backend here"
        console.print(f"{bundle} {says}.", markup=False)
