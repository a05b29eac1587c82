"""What is refused: models and sizes before any process starts, and batches without harm to the ranks."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferencex.formats.errors import BackendError, OptionError
from inferencex.runtime import LLM
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.backends.reference import ReferenceBackend
from inferencex.runtime.parallel import backend as backend_module
from inferencex.runtime.parallel.backend import ParallelBackend
from inferencex.runtime.parallel.executable import ParallelExecutable
from inferencex.runtime.parallel.wire import Message
from tests.runtime.parallel.conftest import OPTIONS, MakeBundle
from tests.runtime.parallel.endings import prompt_batch
from tests.runtime.parallel.ranks import EVERYTHING


def test_a_batch_that_all_refuse_harms_nothing(running: ParallelExecutable) -> None:
    expected = running.step(prompt_batch()).copy()
    with pytest.raises(BackendError, match="longer than max_model_len"):
        running.step(prompt_batch(65))
    np.testing.assert_array_equal(running.step(prompt_batch()), expected)


def test_a_refusal_that_was_settled_ends_nothing_later(running: ParallelExecutable) -> None:
    """Its timer must not take the next one's, which is not settled yet, for its own."""
    workers = running._workers
    settled, open_ = Message("refused", {"error": "one"}), Message("refused", {"error": "another"})
    workers._refusals.append(open_)
    workers._end_if_alone(workers._workers[0], settled)
    workers._refusals.clear()
    assert workers.failure is None
    running.step(prompt_batch())


def test_a_folder_that_cannot_be_made_is_named(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = make_bundle("llama")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(backend_module, "Workers", _unexpected)
    with pytest.raises(BackendError, match="set TMPDIR to a folder"):
        ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(bundle, OPTIONS)


def test_a_torch_that_cannot_be_loaded_is_named(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(BackendError, match=r"'torch', which cannot be loaded: OSError: libtorch.*\[parallel\] anew"):
        ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(make_bundle("llama"), OPTIONS)


def test_without_torch_the_extra_is_named(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"install inferencex\[parallel\]"):
        LLM(make_bundle("llama"), backend=CpuBackend(), tensor_parallel_size=2)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
def test_a_size_that_is_none_is_refused(make_bundle: MakeBundle, size: Any) -> None:
    with pytest.raises(OptionError, match="tensor_parallel_size"):
        LLM(make_bundle("llama"), backend=CpuBackend(), tensor_parallel_size=size)


def test_a_backend_that_does_not_divide_is_refused(make_bundle: MakeBundle) -> None:
    with pytest.raises(
        OptionError, match="the backend 'reference' does not divide models; use the backend cpu or triton"
    ):
        LLM(make_bundle("llama"), backend=ReferenceBackend(), tensor_parallel_size=2)


def test_a_size_that_does_not_divide_is_refused_before_anything_starts(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "Workers", _unexpected)
    with pytest.raises(OptionError, match=r"4 query heads and 2 key-value heads, .* possible sizes are 1, 2, 4$"):
        ParallelBackend(CpuBackend(), 3, EVERYTHING).compile(make_bundle("llama"), OPTIONS)


_unexpected: Callable[..., Any] = lambda *arguments: pytest.fail("processes were started")  # noqa: E731
