"""Compile a bundle for the reference backend."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from inferencex.formats.bundle import Bundle
from inferencex.formats.bundle.layout import GRAPH_FILE
from inferencex.formats.errors import BundleError
from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.backends.position_tables import check_positions
from inferencex.runtime.backends.reference.executable import ReferenceExecutable

_LOG = logging.getLogger(__name__)

# Weights that take more than this as float32 are converted anew at each use instead of being kept.
_KEPT_WEIGHTS_BYTES = 8 << 30


class ReferenceBackend:
    """Runs any bundle, on the CPU, in float32."""

    name = "reference"

    def supports(self, bundle: Path) -> Sequence[str]:
        """Return no reasons: what has no torch implementation runs through `onnx.reference`."""
        return ()

    def compile(self, bundle: Path, options: BackendOptions) -> ReferenceExecutable:
        """Open the bundle, checking it; weights are read when first used."""
        options.warn_of_unused(_LOG, bundle, "by the backend reference", "pin", "gpu_memory_utilization")
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        return compile_bundle(Bundle.open(bundle), options)


def compile_bundle(bundle: Bundle, options: BackendOptions, *, keep_weights: bool | None = None) -> ReferenceExecutable:
    """Make an executable of an open bundle; `keep_weights` None keeps them if they fit in a few GiB.

    Raises BundleError when the manifest promises longer sequences than the graph has tables for.
    """
    facts = bundle.manifest.architecture
    max_model_len, independent = facts.get("max_model_len"), facts.get("length_independent_up_to")
    if not isinstance(max_model_len, int) or max_model_len < 1:
        raise BundleError(
            f"{bundle.path}: bundle.json: architecture.max_model_len is {max_model_len!r}, expected a number"
        )
    check_positions(bundle.graph, max_model_len, str(bundle.path / GRAPH_FILE))
    if keep_weights is None:
        elements = sum(_elements(stored.shape) for stored in bundle.stored.values())
        keep_weights = 4 * elements <= _KEPT_WEIGHTS_BYTES
    return ReferenceExecutable(
        bundle.model,
        options,
        max_model_len=max_model_len,
        length_independent_up_to=independent if isinstance(independent, int) else None,
        keep_weights=keep_weights,
    )


def _elements(shape: Sequence[int]) -> int:
    size = 1
    for dimension in shape:
        size *= dimension
    return size
