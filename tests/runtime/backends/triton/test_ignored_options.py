"""Options that a backend has no use for are not ignored in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.backends.reference import ReferenceBackend
from inferencex.runtime.backends.triton import TritonBackend
from tests import triton_kernels


def warnings_of(backend: Any, bundle: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    caplog.clear()
    backend.compile(bundle, BackendOptions(num_blocks=8, block_size=4, **options))
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("backend", [CpuBackend(), ReferenceBackend(), TritonBackend()], ids=lambda b: b.name)
def test_defaults_are_no_reason_for_a_word(backend: Any, tiny_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(backend, tiny_bundle, caplog) == []


@pytest.mark.parametrize("backend", [CpuBackend(), ReferenceBackend()], ids=lambda backend: backend.name)
def test_a_share_of_a_gpu_on_a_cpu(backend: Any, tiny_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = warnings_of(backend, tiny_bundle, caplog, gpu_memory_utilization=0.5, threads=1)
    assert [text.partition(": ")[2].partition(":")[0] for text in found] == ["gpu_memory_utilization=0.5"]


def test_threads_on_a_gpu(tiny_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = warnings_of(TritonBackend(), tiny_bundle, caplog, threads=2, pin=True, gpu_memory_utilization=0.5)
    assert len(found) == 2
    assert "threads=2, pin=True: not used on " in found[0]
    why = "where the size of the KV cache is given" if triton_kernels.device() == "cuda" else "on the CPU"
    assert found[1].endswith(f"gpu_memory_utilization=0.5: not used {why}")
