"""`inferencex tune`: the fastest launch options for what a bundle launches on this GPU, measured and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inferencex.cli.console import DebugOption

app = typer.Typer(add_completion=False)


@app.command()
def tune(
    bundle: Annotated[Path, typer.Argument(help="A bundle.")],
    device: Annotated[str, typer.Option(help="auto, cuda, rocm, or a GPU by its number such as cuda:1.")] = "auto",
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens in a step; repeatable (default: a few from 1 to 1024).")
    ] = None,
    activation_dtype: Annotated[str, typer.Option(help="As the bundle will be run.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="As the bundle will be run.")] = "auto",
    again: Annotated[bool, typer.Option("--again", help="Measure what was measured before as well.")] = False,
    debug: DebugOption = False,
) -> None:
    """Measure launch options of a bundle's linears, experts and attention, and keep the fastest for this GPU."""
    from inferencex.formats.errors import BackendError
    from inferencex.runtime.backends.base import BackendOptions

    try:
        from inferencex.runtime.backends.triton.tune import DEFAULT_TOKENS, tune_bundle, tuning_path
    except ModuleNotFoundError as error:
        raise BackendError(
            f"tuning needs the package {error.name!r}; install inferencex[cuda] or inferencex[rocm]"
        ) from error
    except (ImportError, OSError) as error:
        raise BackendError(
            f"what tuning needs cannot be loaded: {type(error).__name__}: {error}; install inferencex[cuda] or "
            "inferencex[rocm] anew"
        ) from error
    options = BackendOptions(device=device, activation_dtype=activation_dtype, kv_cache_dtype=kv_cache_dtype)
    path, count = tuning_path(device), 0
    for tuned in tune_bundle(bundle, options, tokens or DEFAULT_TOKENS, again=again):
        typer.echo(f"{tuned.kernel} {tuned.shape_class}: {tuned.config}")
        count += 1
    typer.echo(f"{count} classes of shapes: {path}")
