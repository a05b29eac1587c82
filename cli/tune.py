"""`inferencex tune`: the fastest launch options for a bundle's linears on this GPU, measured and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inferencex.cli.console import DebugOption

app = typer.Typer(add_completion=False)


@app.command()
def tune(
    bundle: Annotated[Path, typer.Argument(help="A bundle with quantized linears.")],
    device: Annotated[str, typer.Option(help="auto, cuda, rocm, or a GPU by its number such as cuda:1.")] = "auto",
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens in a step; repeatable. [default: a few from 1 to 2048]")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Measure launch options for each shape of quantized linear in a bundle, and keep the fastest for this GPU."""
    from inferencex.formats.errors import BackendError

    try:
        from inferencex.runtime.backends.triton.tune import DEFAULT_TOKENS, tune_bundle, tuning_path
    except ModuleNotFoundError as error:
        raise BackendError(
            f"tuning needs the package {error.name!r}; install inferencex[cuda] or inferencex[rocm]"
        ) from error
    count = 0
    for tuned in tune_bundle(bundle, device, tokens or DEFAULT_TOKENS):
        typer.echo(f"{tuned.shape_class}: {tuned.config}")
        count += 1
    typer.echo(f"{count} classes of shapes: {tuning_path(device)}" if count else "the bundle has no quantized linears")
