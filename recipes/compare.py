"""`inferencex compare`: how far the distributions of bundles are from those of a reference bundle, on a text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from inferencex.cli.console import DebugOption, run_app, stderr_console
from inferencex.formats.errors import OptionError
from inferencex.runtime.backends import select_backend
from inferencex.runtime.backends.base import Executable
from inferencex.runtime.backends.divergence import (
    Divergence,
    log_softmax,
    whole_sequence_logits,
    whole_sequence_options,
)
from inferencex.runtime.text import Tokenizer

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


def windows_of(token_ids: Sequence[int], length: int, count: int) -> Iterator[Sequence[int]]:
    """Yield up to `count` consecutive windows of `length` tokens that do not overlap."""
    for start in range(0, min(len(token_ids) // length, count) * length, length):
        yield token_ids[start : start + length]


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


def builtin_text() -> str:
    """Return English text that ships with Python: its own language reference."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


@app.command()
def run(
    reference: Annotated[Path, typer.Argument(help="The bundle to compare with.")],
    bundles: Annotated[list[Path], typer.Argument(help="The bundles to compare.")],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    debug: DebugOption = False,
) -> None:
    """Measure KL divergence, agreement on the most likely token and perplexity of bundles against a reference.

    The reference runs on float32 activations. A bundle compared with itself shows what INT8 activations cost.
    """
    try:
        content = text.read_text(encoding="utf-8") if text is not None else builtin_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--text {text}: cannot be read as UTF-8 text: {error}") from error
    stderr_console().print(f"{len(bundles) + 1} bundles, up to {windows} windows of {length} tokens ...")
    summaries = compare(
        reference,
        bundles,
        content,
        windows=windows,
        length=length,
        backend=backend,
        activation_dtype=activation_dtype,
        kv_cache_dtype=kv_cache_dtype,
    )
    if as_json:
        typer.echo(json.dumps([asdict(summary) for summary in summaries], indent=1))
        return
    table = Table("bundle", "tokens", "mean KL", "p99 KL", "same top-1", "perplexity")
    for s in summaries:
        table.add_row(
            s.bundle, str(s.tokens), f"{s.mean_kl:.4f}", f"{s.p99_kl:.4f}", f"{s.same_top1:.1%}", f"{s.perplexity:.2f}"
        )
    Console(highlight=False, width=None if Console().is_terminal else 120).print(table)


def main() -> None:
    """Run `inferencex compare`."""
    run_app(app, "inferencex compare")
