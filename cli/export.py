"""`inferencex export`: a bundle in the format of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inferencex.cli.console import DebugOption, stderr_console
from inferencex.formats.export.export import FORMATS

app = typer.Typer(add_completion=False)


@app.command()
def export(
    bundle: Annotated[Path, typer.Argument(help="Directory of a bundle.")],
    format_name: Annotated[str, typer.Option("--format", help=f"What to write: {', '.join(FORMATS)}.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write, or file where the format is gguf.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    debug: DebugOption = False,
) -> None:
    """Write a bundle for other tools: weights keep their integers, and what a format cannot say is refused.

    awq, gptq: for transformers with GPTQModel, vLLM and others. compressed-tensors: for vLLM and transformers.
    gguf: for llama.cpp. onnx: for onnxruntime-genai, and as a plain graph for any ONNX runtime.
    """
    from inferencex.formats.export import export_bundle

    done = export_bundle(bundle, format_name, output, overwrite=overwrite)
    console = stderr_console()
    for note in done.notes:
        console.print(f"note: {note}", markup=False)
    console.print(f"{done.path}: {done.nbytes / 2**20:.1f} MiB ({format_name})", markup=False)
