"""Bundles on text held out: the figures are those of the logits, whichever backend runs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inferencex.convert import held_out
from inferencex.convert.capture import capture
from inferencex.convert.fidelity import bundle_logits, compare_logits
from inferencex.convert.held_out import held_out_fidelity, source_runner
from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize import parse_scheme
from inferencex.convert.source.mapping import resolve_parameters
from inferencex.convert.source.open import open_checkpoint
from inferencex.formats.errors import FidelityError
from inferencex.runtime.backends.base import Float32Array
from tests.architectures import zoo
from tests.smollm2 import Quiet

LENGTH, VOCABULARY = 40, 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny checkpoint and a bundle of it."""
    folder = tmp_path_factory.mktemp("held_out")
    tiny = zoo.tiny_model("llama")
    tiny.save_pretrained(folder / "source")
    convert(ConvertOptions(str(folder / "source"), folder / "bundle", parse_scheme("rtn-int4")), Quiet())
    return folder


@pytest.fixture(scope="module")
def source(model: Path) -> held_out.SourceLogits:
    checkpoint = open_checkpoint(str(model / "source"))
    captured = capture(checkpoint.config, trust_remote_code=False)
    return source_runner(captured, resolve_parameters(captured.module, checkpoint))


@pytest.fixture(scope="module")
def windows() -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, VOCABULARY, (3, LENGTH))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_figures_are_those_of_the_logits(
    model: Path, source: held_out.SourceLogits, windows: NDArray[np.int64], backend: str
) -> None:
    told: list[tuple[int, int]] = []
    found = held_out_fidelity(
        source, model / "bundle", windows, backend=backend, progress=lambda done, total: told.append((done, total))
    )
    each = [
        compare_logits(
            torch.from_numpy(source(window)), bundle_logits(model / "bundle", window.tolist()), torch.from_numpy(window)
        )
        for window in windows
    ]
    assert (found.windows, found.length, found.backend) == (3, LENGTH, backend)
    assert found.mean_kl == pytest.approx(np.mean([one.mean_kl for one in each]), rel=1e-3)
    assert found.same_top1 == pytest.approx(np.mean([one.same_top1 for one in each]), abs=0.03)
    for name in ("source_perplexity", "bundle_perplexity"):
        mean = np.exp(np.mean([np.log(getattr(one, name)) for one in each]))
        assert getattr(found, name) == pytest.approx(mean, rel=1e-3)
    assert found.mean_kl < found.p99_kl <= max(one.max_kl for one in each) * 1.001
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_large_bundles_run_where_weights_are_not_kept(
    model: Path, source: held_out.SourceLogits, windows: NDArray[np.int64], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert held_out_fidelity(source, model / "bundle", windows[:1]).backend == "cpu"
    monkeypatch.setattr(held_out, "_REPACKED_BYTES", 100)
    assert held_out_fidelity(source, model / "bundle", windows[:1]).backend == "reference"


def test_logits_that_are_not_finite_are_refused(model: Path, windows: NDArray[np.int64]) -> None:
    def broken(token_ids: NDArray[np.int64]) -> Float32Array:
        return np.full((len(token_ids), VOCABULARY), np.nan, dtype=np.float32)

    with pytest.raises(FidelityError, match="not finite"):
        held_out_fidelity(broken, model / "bundle", windows)
