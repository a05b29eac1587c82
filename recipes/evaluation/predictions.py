"""Perplexity of a bundle on a text, and how far its predictions are from a baseline's, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.errors import FidelityError
from inferencex.recipes.evaluation.progress import Watcher
from inferencex.recipes.evaluation.recipe import EngineOptions, TextMeasure
from inferencex.recipes.evaluation.texts import windows
from inferencex.runtime.backends import select_backend
from inferencex.runtime.backends.base import Executable
from inferencex.runtime.backends.divergence import (
    Divergence,
    DivergenceSummary,
    whole_sequence_logits,
    whole_sequence_options,
)
from inferencex.runtime.text import Tokenizer

RESAMPLES = 400
_SEED = 0


@dataclass(frozen=True)
class Figure:
    """A number and its 95 % interval, found by resampling the windows of the text; None for a single window."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Predictions:
    """Figures of a bundle on a text. KL in nats per token from a baseline, `same_top1` a share; None without one."""

    text: str
    windows: int
    length: int
    perplexity: Figure
    baseline_perplexity: float | None = None
    mean_kl: Figure | None = None
    p99_kl: Figure | None = None
    same_top1: Figure | None = None


def measure_predictions(
    bundle: Path, baseline: Path | None, measure: TextMeasure, engine: EngineOptions, section: str, watcher: Watcher
) -> Predictions:
    """Run a bundle over windows of a text, beside a baseline bundle if there is one.

    The baseline runs on float32 activations, keys and values; the bundle as `engine` says. In memory are both, and
    the logits of one window. Raises RecipeError for a text that cannot be had, BundleError or BackendError for a
    bundle that cannot be run, FidelityError when logits are not finite.
    """
    texts = windows(measure, section, Tokenizer.load(bundle))
    model = _executable(bundle, engine, measure.length, engine.activation_dtype, engine.kv_cache_dtype)
    reference = None if baseline is None else _executable(baseline, engine, measure.length, "float32", "float32")
    if baseline is not None:
        _check_same_tokens(bundle, baseline, texts[0])
    found: list[DivergenceSummary] = []
    per_token: list[NDArray[np.float64]] = []
    for done, window in enumerate(texts, 1):
        divergence = Divergence()
        logits = whole_sequence_logits(model, window)
        if not np.isfinite(logits).all():
            raise FidelityError(f"{bundle}: logits on {measure.text} are not finite; its weights or scales are broken")
        divergence.add(logits if reference is None else whole_sequence_logits(reference, window), logits, window)
        found.append(divergence.summary())
        per_token.append(divergence.per_token)
        watcher.advance(section, done, len(texts))
    shown = Path(measure.text).name
    losses = np.log([each.perplexity for each in found])
    perplexity = _figure(losses, lambda rows: math.exp(losses[rows].mean()))
    if reference is None:
        return Predictions(shown, len(texts), measure.length, perplexity)
    kl = np.stack(per_token)
    top1 = np.array([each.same_top1 for each in found])
    return Predictions(
        text=shown,
        windows=len(texts),
        length=measure.length,
        perplexity=perplexity,
        baseline_perplexity=math.exp(np.log([each.reference_perplexity for each in found]).mean()),
        mean_kl=_figure(kl, lambda rows: float(kl[rows].mean())),
        p99_kl=_figure(kl, lambda rows: float(np.quantile(kl[rows], 0.99))),
        same_top1=_figure(top1, lambda rows: float(top1[rows].mean())),
    )


def _figure(windows: NDArray[np.float64], statistic: Callable[[NDArray[np.intp]], float]) -> Figure:
    """Return a statistic of windows `[W, ...]`, and its percentile interval over windows drawn with replacement."""
    count = len(windows)
    value = statistic(np.arange(count))
    if count == 1:
        return Figure(value)
    generator = np.random.default_rng(_SEED)
    drawn = [statistic(generator.integers(0, count, count)) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    return Figure(value, low, high)


def _executable(bundle: Path, engine: EngineOptions, length: int, activations: str, kv_cache: str) -> Executable:
    options = whole_sequence_options(length, activations, kv_cache)
    if engine.threads is not None:
        options = replace(options, threads=engine.threads)
    return select_backend(engine.backend, bundle).compile(bundle, options)


def _check_same_tokens(bundle: Path, baseline: Path, ids: Sequence[int]) -> None:
    tokenizers = [Tokenizer.load(path) for path in (bundle, baseline)]
    text = tokenizers[0].decode(list(ids), skip_special_tokens=False)
    one, other = (tokenizer.encode(text, add_special_tokens=False) for tokenizer in tokenizers)
    if one != other:
        raise FidelityError(
            f"{bundle} and {baseline} have different tokenizers, so that their predictions cannot be compared token by "
            "token; give the model that the bundle was made from as baseline"
        )
