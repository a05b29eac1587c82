"""Tiny bundles that are divided in every test here, and processes that do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.parallel.backend import ParallelBackend
from inferencex.runtime.parallel.executable import ParallelExecutable
from tests import triton_kernels
from tests.architectures.ragged import BLOCK_SIZE, LENGTHS, blocks_needed
from tests.runtime.parallel.ranks import EVERYTHING

pytest.importorskip("transformers", reason="needs the extra inferencex[convert]")

if triton_kernels.AVAILABLE:
    triton_kernels.hasten_interpreter()
else:
    collect_ignore = ["test_triton_ranks.py"]

OPTIONS = BackendOptions(num_blocks=blocks_needed(LENGTHS), block_size=BLOCK_SIZE, threads=1)

THREE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
"""What makes a model one that three ranks can divide."""

MakeBundle = Callable[..., Path]


@pytest.fixture(scope="session")
def make_bundle(tmp_path_factory: pytest.TempPathFactory) -> MakeBundle:
    """Return a function that converts a tiny random model of an architecture, each once."""
    from tests.architectures.comparison import write_bundle
    from tests.architectures.shrink import tiny_config
    from tests.architectures.zoo import tiny_model

    made: dict[str, Path] = {}

    def make(name: str, quantization: str = "none", **overrides: Any) -> Path:
        key = repr((name, quantization, sorted(overrides.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            model, config = tiny_model(name, **overrides), tiny_config(name, **overrides)
            made[key] = write_bundle(model, config, folder, quantization)
        return made[key]

    return make


@pytest.fixture(scope="session")
def running(make_bundle: MakeBundle) -> Iterator[ParallelExecutable]:
    """A tiny model on two ranks, for tests that leave them as they are."""
    executable = ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(make_bundle("llama"), OPTIONS)
    yield executable
    executable.close()


@pytest.fixture
def compiled(make_bundle: MakeBundle) -> Iterator[ParallelExecutable]:
    """A tiny model on two ranks, which may come to harm."""
    executable = ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(make_bundle("llama"), OPTIONS)
    yield executable
    executable.close()
