"""Compile a bundle for the CPU: lower its graph, repack its weights, allocate its layer state."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from inferencex.formats.bundle import Bundle
from inferencex.formats.bundle.layout import GRAPH_FILE
from inferencex.formats.errors import BackendError, BundleError, OptionError
from inferencex.formats.kv_cache import KV_LARGEST, KVScales
from inferencex.formats.records import record
from inferencex.runtime.backends.base import DEFAULT_KV_CACHE_MEMORY, BackendOptions, MemoryNeeds, ModelFacts
from inferencex.runtime.backends.cpu.executable import CpuExecutable, begin_program
from inferencex.runtime.backends.cpu.lowering import (
    LoweredProgram,
    LoweringOptions,
    check_nodes,
    kv_scales_of,
    layer_shapes,
    lower_graph,
)
from inferencex.runtime.backends.cpu.lowering.layer_state import layout_of
from inferencex.runtime.backends.cpu.memory_limits import check_memory
from inferencex.runtime.backends.cpu.threads import default_threads, pin_order
from inferencex.runtime.backends.kv_cache import calibrated_scales
from inferencex.runtime.backends.position_tables import check_positions

if TYPE_CHECKING:
    from inferencex.runtime.parallel.communicator import Communicator

_LOG = logging.getLogger(__name__)

ACTIVATION_DTYPES = ("auto", "int8", "float32")
KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8", "fp8")
_MOST_FLOAT16 = 65504.0


class CpuBackend:
    """Runs bundles on the CPU with native kernels.

    Activations in front of INT4 and INT8 weights are quantized to INT8 in groups unless `activation_dtype` says
    float32. `kv_cache_dtype="auto"` keeps keys and values as the bundle was calibrated for, if it was; else in bfloat16
    where activations are INT8, and in float32 elsewhere. Without calibrated scales `int8` finds a scale for each token
    and head. FP8 is computed, but not stored: numbers that FP8 can say lie in pages of float16.
    """

    name = "cpu"

    def supports(self, bundle: Path) -> Sequence[str]:
        """Return no reasons: what has no native kernel runs through `onnx.reference`."""
        return ()

    def compile(self, bundle: Path, options: BackendOptions) -> CpuExecutable:
        """Open the bundle, checking it, and make it ready to run; see `Backend.compile`."""
        return compile_bundle(Bundle.open(bundle), options)

    def rank_options(self, options: BackendOptions, rank: int, size: int) -> BackendOptions:
        """Divide threads and memory evenly: all ranks are on this machine."""
        memory = DEFAULT_KV_CACHE_MEMORY if options.kv_cache_memory is None else options.kv_cache_memory
        threads = (options.threads or default_threads()) // size
        return replace(options, threads=max(threads, 1), kv_cache_memory=memory // size)

    def connect(self, options: BackendOptions, store: str, rank: int, size: int) -> Communicator:
        """Join the other ranks by gloo; see `ShardingBackend`."""
        from inferencex.runtime.parallel.gloo import GlooCommunicator  # which imports torch

        return GlooCommunicator(store, rank, size)

    def compile_shard(self, bundle: Bundle, options: BackendOptions, communicator: Communicator) -> CpuExecutable:
        """Make one rank's part of a bundle ready to run; see `ShardingBackend`."""
        return compile_bundle(bundle, options, communicator)

    def facts_of(self, bundle: Bundle, options: BackendOptions) -> ModelFacts:
        """Return what can be known of an open bundle before it is compiled; see `ShardingBackend`."""
        return _facts_of(bundle, options, _dtypes(bundle, options)[1])

    def blocks_of(self, bundle: Bundle, options: BackendOptions) -> int | None:
        """Return how many blocks a part has room for; see `ShardingBackend`."""
        return options.blocks_for(self.facts_of(bundle, options))

    def memory_needs(self, bundle: Path, options: BackendOptions) -> MemoryNeeds:
        """Lower the bundle's graph; see `MemoryPlanner`. Weights count as stored, for repacked they keep their size."""
        return self.memory_needs_of(Bundle.open(bundle), options)

    def memory_needs_of(
        self, opened: Bundle, options: BackendOptions, communicator: Communicator | None = None
    ) -> MemoryNeeds:
        """Return the same of an open bundle, or of one rank's part of it."""
        lowered = lower_bundle(opened, options, communicator)
        lowering, bytes_per_block = lowered.options, lowered.facts.bytes_per_token * lowered.options.block_size
        longest = -(-lowering.max_model_len // lowering.block_size)
        return MemoryNeeds(
            weights=sum(stored.nbytes for stored in opened.stored.values()),
            state=bytes_per_block * lowering.num_blocks,
            step=lowered.program.memory.arena_bytes,
            state_of_longest=bytes_per_block * min(longest, lowering.num_blocks),
        )


@record(frozen=True, eq=False)
class LoweredBundle:
    """A bundle's program, and what it was made for."""

    program: LoweredProgram
    options: LoweringOptions
    facts: ModelFacts


def _facts_of(bundle: Bundle, options: BackendOptions, kv_dtype: str) -> ModelFacts:
    facts = bundle.manifest.architecture
    max_model_len, independent = facts.get("max_model_len"), facts.get("length_independent_up_to")
    if not isinstance(max_model_len, int) or max_model_len < 1:
        raise BundleError(
            f"{bundle.path}: bundle.json: architecture.max_model_len is {max_model_len!r}, expected a number"
        )
    layers = layer_shapes(bundle.graph)
    return ModelFacts(
        vocab_size=_vocab_size(bundle),
        max_model_len=max_model_len,
        num_layers=len(layers),
        bytes_per_token=-(-layout_of(layers, options.block_size, kv_dtype).block_stride // options.block_size),
        length_independent_up_to=independent if isinstance(independent, int) else None,
    )


def lower_bundle(bundle: Bundle, options: BackendOptions, communicator: Communicator | None = None) -> LoweredBundle:
    """Lower the graph of an open bundle; with a communicator, of one rank's part of a bundle.

    Raises OptionError for options out of range, BundleError when the manifest promises what the graph does not hold,
    BackendError when the graph cannot be lowered.
    """
    graph = bundle.graph
    check_nodes(graph)
    integer_activations, kv_dtype, kv_scales = _dtypes(bundle, options)
    model_facts = _facts_of(bundle, options, kv_dtype)
    check_positions(graph, model_facts.max_model_len, str(bundle.path / GRAPH_FILE))
    lowering = LoweringOptions(
        integer_activations=integer_activations,
        kv_dtype=kv_dtype,
        max_tokens=options.max_num_batched_tokens,
        max_seqs=options.max_num_seqs,
        max_model_len=min(model_facts.max_model_len, options.max_model_len or model_facts.max_model_len),
        num_blocks=options.blocks_for(model_facts),
        block_size=options.block_size,
        kv_scales=kv_scales,
        communicator=communicator,
    )
    program = lower_graph(graph, bundle.tensor, lowering)
    if program.logits.dims[1].coefficient != model_facts.vocab_size:
        raise BackendError(
            f"{bundle.path / GRAPH_FILE}: the logits have {program.logits.dims[1]} columns, and the graph says "
            f"{model_facts.vocab_size}"
        )
    return LoweredBundle(program, lowering, model_facts)


def compile_bundle(bundle: Bundle, options: BackendOptions, communicator: Communicator | None = None) -> CpuExecutable:
    """Make an executable of an open bundle. Raises what `lower_bundle` does, and BackendError for want of memory.

    communicator: to the other ranks, where the bundle is one rank's part
    """
    options.warn_of_unused(_LOG, bundle.path, "on the CPU", "gpu_memory_utilization")
    threads = options.threads or default_threads()
    rank, ranks = (0, 1) if communicator is None else (communicator.rank, communicator.size)
    cpus = pin_order(threads * ranks)[threads * rank : threads * (rank + 1)] if options.pin else []
    program = begin_program(threads, cpus, bundle)
    lowered = lower_bundle(bundle, options, communicator)
    check_memory(lowered.program, lowered.options, lowered.facts.bytes_per_token)
    executable = CpuExecutable(program, lowered.program, lowered.options, lowered.facts, meanwhile=options.meanwhile)
    if any(scales.format == "fp8" for scales in lowered.options.kv_scales.values()):
        _LOG.info("%s: keys and values are rounded to FP8 with calibrated scales, and lie in float16", bundle.path)
    elif lowered.options.kv_scales:
        _LOG.info("%s: keys and values are INT8 with calibrated scales", bundle.path)
    memory, fallbacks = lowered.program.memory, lowered.program.fallbacks
    _LOG.info(
        "%s: %d operations for %s on %d threads; the values of a step take %.1f MB, reuse saves %.1f MB",
        bundle.path,
        len(lowered.program.instructions),
        executable.isa,
        executable.threads,
        memory.arena_bytes / 1e6,
        memory.saved_bytes / 1e6,
    )
    if fallbacks:
        counts = ", ".join(f"{name} ({count})" for name, count in sorted(Counter(fallbacks).items()))
        _LOG.warning("%s: run by onnx.reference, slowly, for want of a native kernel: %s", bundle.path, counts)
    if lowered.program.widened:
        _LOG.warning(
            "%s: %d weights are stored in a way that no kernel reads, and take the memory of float32: %s",
            bundle.path,
            len(lowered.program.widened),
            ", ".join(lowered.program.widened[:3]) + (", ..." if len(lowered.program.widened) > 3 else ""),
        )
    return executable


def _dtypes(bundle: Bundle, options: BackendOptions) -> tuple[bool, str, Mapping[int, KVScales]]:
    """Return whether activations are INT8, the type that keys and values lie in, and scales they are rounded with."""
    if options.activation_dtype not in ACTIVATION_DTYPES:
        raise OptionError(
            f"activation_dtype={options.activation_dtype!r}; expected one of {', '.join(ACTIVATION_DTYPES)}"
        )
    if options.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise OptionError(f"kv_cache_dtype={options.kv_cache_dtype!r}; expected one of {', '.join(KV_CACHE_DTYPES)}")
    integer = options.activation_dtype != "float32" and bool(bundle.manifest.quantization)
    scales = calibrated_scales(options.kv_cache_dtype, kv_scales_of(bundle.graph))
    if scales:
        return integer, _type_of_pages(bundle, scales), scales
    if options.kv_cache_dtype != "auto":
        return integer, options.kv_cache_dtype, {}
    return integer, "bfloat16" if integer else "float32", {}


def _type_of_pages(bundle: Bundle, scales: Mapping[int, KVScales]) -> str:
    """Return what numbers with calibrated scales lie in: INT8 as it is, FP8 in float16."""
    if next(iter(scales.values())).format == "int8":
        return "int8"
    for layer, of_layer in scales.items():
        largest = KV_LARGEST["fp8"] * max(of_layer.keys + of_layer.values)
        if largest > _MOST_FLOAT16:
            raise BackendError(
                f"{bundle.path}: keys and values of layer {layer} reach {largest:.3g}, more than the float16 that FP8 "
                "lies in can hold here; use kv_cache_dtype float32, bfloat16 or int8"
            )
    return "float16"


def _vocab_size(bundle: Bundle) -> int:
    shape = bundle.graph.outputs[0].shape if bundle.graph.outputs else None
    width = shape[-1] if shape else None
    if not isinstance(width, int) or width < 1:
        raise BackendError(f"{bundle.path / GRAPH_FILE}: the logits have shape {shape}; expected [rows, vocabulary]")
    return width
