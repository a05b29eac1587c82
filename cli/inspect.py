"""`inferencex inspect`: what is in a bundle."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from inferencex.cli.console import DebugOption
from inferencex.formats.errors import OptionError

if TYPE_CHECKING:
    from inferencex.formats.bundle import Bundle
    from inferencex.formats.bundle.manifest import TensorQuantization

app = typer.Typer(add_completion=False)


@app.command()
def inspect(
    bundle: Annotated[Path, typer.Argument(help="Directory of a bundle.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Also hash every file and compare with bundle.json.")
    ] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Also list the graph node by node.")] = False,
    program: Annotated[
        bool, typer.Option("--program", help="Also list the operations that the CPU backend makes of it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show a bundle's source, operators before and after the passes, weights by format, and files."""
    from inferencex.formats.bundle import Bundle

    if as_json and (graph or program):
        raise OptionError("--json holds neither graph nor program; give --graph and --program without it")
    opened = Bundle.open(bundle, verify=verify)
    facts = describe(opened)
    if as_json:
        typer.echo(json.dumps(facts, indent=1, sort_keys=True))
        return
    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    _print(console, facts, verified=verify)
    if graph:
        for node in opened.graph:
            console.print(str(node), markup=False, soft_wrap=True)
    if program:
        from inferencex.runtime.backends.base import BackendOptions
        from inferencex.runtime.backends.cpu.backend import lower_bundle
        from inferencex.runtime.backends.cpu.listing import program_lines

        for line in program_lines(lower_bundle(opened, BackendOptions()).program):
            console.print(line, markup=False, soft_wrap=True)


def describe(bundle: Bundle) -> dict[str, Any]:
    """Collect what there is to say about a bundle, as plain JSON values."""
    manifest = bundle.manifest
    architecture = dict(manifest.architecture)
    operators = architecture.pop("operators", {})
    folded = architecture.pop("folded", {})
    after: dict[str, int] = defaultdict(int)
    for node in bundle.graph:
        after[f"{node.domain}::{node.op_type}" if node.domain else node.op_type] += 1
    owners = {n: q for q in manifest.quantization.values() for n in (q.scales, q.zero_points, q.tensor_scale) if n}
    formats: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "parameters": 0, "bytes": 0})
    for name, stored in bundle.stored.items():
        entry = manifest.quantization.get(name)
        if name in owners:
            formats[_format(owners[name])]["bytes"] += stored.nbytes
            continue
        kind = stored.dtype.name.lower() if entry is None else _format(entry)
        formats[kind]["tensors"] += 1
        formats[kind]["bytes"] += stored.nbytes
        count = 1
        for dimension in stored.shape if entry is None else entry.shape:
            count *= dimension
        formats[kind]["parameters"] += count
    return {
        "path": str(bundle.path),
        "source": manifest.source,
        "architecture": architecture,
        "scheme": manifest.scheme,
        "tools": dict(manifest.tools),
        "operators": {"before": operators.get("before", {}), "after": dict(after)},
        "passes": folded,
        "weights": {kind: dict(counts) for kind, counts in sorted(formats.items())},
        "files": {name: record.size for name, record in manifest.files.items()},
    }


def _format(entry: TensorQuantization) -> str:
    group = "per channel" if entry.group_size < 0 else f"g{entry.group_size}"
    if entry.number == "int":
        return f"int{entry.bits} {group} {'symmetric' if entry.symmetric else 'asymmetric'} ({entry.method})"
    name = "fp8" if entry.number == "e4m3" else "mxfp4" if entry.tensor_scale is None else "nvfp4"
    return f"{name} {group} ({entry.method})"


def _print(console: Console, facts: Mapping[str, Any], *, verified: bool) -> None:
    source, architecture = facts["source"], facts["architecture"]
    console.print(f"[bold]{facts['path']}[/bold]")
    console.print(
        f"source        {source.get('id')} ({source.get('kind')}, revision {source.get('revision') or 'not known'})"
    )
    console.print(
        f"architecture  {architecture.get('class')}, {architecture.get('parameters', 0):,} parameters, "
        f"sequences of up to {architecture.get('max_model_len'):,} tokens"
    )
    console.print(f"quantization  {facts['scheme'].get('name')}, plain weights {facts['scheme'].get('dtype')}")
    if "kv_cache" in facts["scheme"]:
        console.print(f"KV cache      {facts['scheme']['kv_cache']}, calibrated scales for each layer and KV head")
    before, after = facts["operators"]["before"], facts["operators"]["after"]
    table = Table(
        "operator", "captured", "in the bundle", title=f"Graph: {sum(before.values())} -> {sum(after.values())} nodes"
    )
    for name in sorted({*before, *after}, key=lambda n: (-after.get(n, 0), -before.get(n, 0), n)):
        table.add_row(name, str(before.get(name, 0) or ""), str(after.get(name, 0) or ""))
    console.print(table)
    passes = Table("pass", "applied", title="Passes")
    for name, count in facts["passes"].items():
        passes.add_row(name, str(count))
    console.print(passes)
    weights = Table("format", "tensors", "parameters", "bytes", "bits per weight", title="Weights")
    for kind, counts in facts["weights"].items():
        bits = 8 * counts["bytes"] / counts["parameters"] if counts["parameters"] else 0.0
        weights.add_row(
            kind, str(counts["tensors"]), f"{counts['parameters']:,}", f"{counts['bytes']:,}", f"{bits:.2f}"
        )
    console.print(weights)
    files = Table("file", "bytes", title="Files, hashes verified" if verified else "Files")
    for name, size in facts["files"].items():
        files.add_row(name, f"{size:,}")
    console.print(files)
