"""Convert a tiny checkpoint, run its bundle over ragged batches, and compare with `transformers`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import transformers
from numpy.typing import NDArray
from torch import nn

from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize.scheme import parse_scheme
from inferencex.runtime.backends.base import BackendOptions, Executable
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.backends.cpu.native import _cpu
from inferencex.runtime.backends.reference import ReferenceBackend
from tests import triton_kernels
from tests.architectures.ragged import BLOCK_SIZE, LENGTHS, blocks_needed, last_logits, ragged_logits, random_sequences
from tests.architectures.shrink import tiny_config
from tests.architectures.zoo import reference_logits, tiny_model
from tests.runtime.parallel.ranks import Ranks

MAX_MODEL_LEN = 64
TOLERANCE = 1e-3
_TOKENS = 250  # below every tiny vocabulary, padded or not


class _Silent:
    """A conversion's observer that says nothing."""

    def stage(self, name: str) -> None: ...

    def advance(self, done: int, total: int, what: str) -> None: ...

    def note(self, text: str) -> None: ...


def largest_errors(name: str, *, look: Callable[[Path], None] | None = None, **overrides: object) -> dict[str, float]:
    """Return, for each way to run a bundle here, the largest difference of any logit between `transformers`, each
    sequence alone, and a ragged batch or a single sequence of whose tokens only the last has its logits asked for.

    The model goes all the way: written as a checkpoint, converted, its bundle read back; `look` is shown the bundle.
    Raises InferenceXError when it cannot be converted, AssertionError when the logits are not finite or have another
    shape.
    """
    model = tiny_model(name, **overrides)
    sequences = random_sequences(_TOKENS)
    expected = [reference_logits(model, tokens) for tokens in sequences]
    with TemporaryDirectory() as folder:
        bundle = write_bundle(model, tiny_config(name, **overrides), Path(folder))
        if look is not None:
            look(bundle)
        return {
            way: _error(executable, sequences, expected) for way, executable in _executables(bundle, look is not None)
        }


def _error(executable: Executable, sequences: list[list[int]], expected: list[NDArray[np.float32]]) -> float:
    results = ragged_logits(executable, sequences)
    last = last_logits(executable, sequences[-1])
    errors = [float(np.abs(last - expected[-1][-1:]).max())]
    for logits, wanted in zip(results, expected, strict=True):
        assert logits.shape == wanted.shape, f"logits are {logits.shape}, expected {wanted.shape}"
        assert np.isfinite(logits).all(), "logits are not finite"
        errors.append(float(np.abs(logits - wanted).max()))
    return max(errors)


def _executables(bundle: Path, divided: bool) -> Iterator[tuple[str, Executable]]:
    """Yield the bundle on the reference backend, and on the CPU backend with every kind of kernels of this machine.

    divided: also on two ranks, which models of the zoo need not have the sizes for, and with the kernels for GPUs,
             which take long in the interpreter
    """
    options = BackendOptions(num_blocks=blocks_needed(LENGTHS), block_size=BLOCK_SIZE, threads=1)
    yield "reference", ReferenceBackend().compile(bundle, options)
    for isa in _cpu.available_isas():
        with mock.patch.dict(os.environ, INFERENCEX_ISA=isa):
            yield f"cpu {isa}", CpuBackend().compile(bundle, options)
    if not divided:
        return
    yield "two ranks", Ranks(bundle, 2, options)
    if triton_kernels.AVAILABLE:
        triton_kernels.hasten_interpreter()
        from inferencex.runtime.backends.triton import TritonBackend

        exact = replace(options, activation_dtype="float32", kv_cache_dtype="float32")
        yield "triton", TritonBackend().compile(bundle, exact)


def largest_error(errors: Mapping[str, float]) -> float:
    """Return the largest of all errors."""
    return max(errors.values())


def write_bundle(
    model: nn.Module,
    config: transformers.PreTrainedConfig,
    folder: Path,
    quantization: str = "none",
    max_model_len: int = MAX_MODEL_LEN,
) -> Path:
    """Save `model` as a checkpoint in `folder` and convert it; returns the bundle's path.

    `config` is what a published checkpoint has beside it; a model that is part of another keeps only its own section.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    assert isinstance(model, transformers.PreTrainedModel)
    checkpoint, bundle = folder / "checkpoint", folder / "bundle"
    model.save_pretrained(checkpoint)
    if type(config) is not type(model.config):
        config.save_pretrained(checkpoint)
    scheme = parse_scheme(quantization)
    options = ConvertOptions(
        str(checkpoint), bundle, scheme, dtype="float32", max_model_len=max_model_len, verify=False
    )
    convert(options, _Silent())
    return bundle
