"""Compile a bundle for a GPU: lower its graph, put its weights there, give its layer state what memory is left."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from inferencex.formats.bundle import Bundle
from inferencex.formats.bundle.layout import GRAPH_FILE
from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.errors import BackendError, BundleError, OptionError
from inferencex.formats.graph import Graph
from inferencex.formats.kv_cache import KVScales
from inferencex.runtime.backends.base import (
    DEFAULT_KV_CACHE_MEMORY,
    BackendOptions,
    DeviceState,
    Draws,
    MemoryNeeds,
    ModelFacts,
    StepBatch,
)
from inferencex.runtime.backends.device_names import DeviceName
from inferencex.runtime.backends.graph.layer_shapes import LayerShape, kv_scales_of, layer_shapes
from inferencex.runtime.backends.graph.static_values import StaticValues
from inferencex.runtime.backends.graph.well_formed import check_nodes
from inferencex.runtime.backends.kv_cache import calibrated_scales
from inferencex.runtime.backends.position_tables import check_positions
from inferencex.runtime.backends.triton.agreement import AgreeingRecorder, numbers_of_ranks
from inferencex.runtime.backends.triton.attention_tiles import DecodeLimits
from inferencex.runtime.backends.triton.decode_graphs import CudaRecorder, Record
from inferencex.runtime.backends.triton.devices import Device, choose_device, devices_of_ranks
from inferencex.runtime.backends.triton.executable import LayerPool, TritonExecutable, on_device, out_of_memory_in_words
from inferencex.runtime.backends.triton.kernels.attention_step import HeadShape
from inferencex.runtime.backends.triton.kernels.decode_tiles import most_floats
from inferencex.runtime.backends.triton.kernels.kv_pages import PAGE_TYPES, Scaling, bytes_per_slot
from inferencex.runtime.backends.triton.kernels.split_sums import SplitSums
from inferencex.runtime.backends.triton.lowering import Program, lower_graph
from inferencex.runtime.backends.triton.lowering.constants import Constants
from inferencex.runtime.backends.triton.pool_memory import DeviceMemory
from inferencex.runtime.parallel.communicator import Communicator
from inferencex.runtime.parallel.gloo import GlooCommunicator
from inferencex.runtime.parallel.nccl import NcclCommunicator
from inferencex.runtime.parallel.through_host import ThroughHost

_LOG = logging.getLogger(__name__)

ACTIVATION_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_CACHE_DTYPES = {**ACTIVATION_DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}

RECORDINGS_SHARE = 0.03
"""Of a GPU's memory, for recorded decode steps."""


class TritonBackend:
    """Runs bundles on a GPU, or, where the environment says `TRITON_INTERPRET=1`, in Triton's interpreter.

    Activations are bfloat16 where the chip multiplies it, float16 elsewhere, and float32 in the interpreter, unless
    `activation_dtype` says otherwise; what the graph quantizes itself is multiplied as INT8 or FP8.
    `kv_cache_dtype="auto"` keeps keys and values as the bundle was calibrated for, else in the type of activations.
    """

    name = "triton"

    def supports(self, bundle: Path) -> Sequence[str]:
        """Return a reason where there is no GPU that kernels can run on."""
        try:
            choose_device(DeviceName("auto"))
        except BackendError as error:
            return (str(error),)
        return ()

    def compile(self, bundle: Path, options: BackendOptions) -> TritonExecutable:
        """Open the bundle, checking it, and make it ready to run; see `Backend.compile`."""
        return compile_bundle(Bundle.open(bundle), options, choose_device(DeviceName.parse(options.device)))

    def rank_options(self, options: BackendOptions, rank: int, size: int) -> BackendOptions:
        """Give each rank a GPU of its own, and its share of a KV cache whose size is asked for.

        Activations have a type that all of the GPUs multiply. Raises OptionError for a single GPU by its number, and
        BackendError when there are fewer than ranks.
        """
        devices = devices_of_ranks(DeviceName.parse(options.device), size)
        device, memory, dtype = devices[rank], options.kv_cache_memory, options.activation_dtype
        if device.kind == "interpreter":  # where all ranks share the memory of one machine
            memory = DEFAULT_KV_CACHE_MEMORY if memory is None else memory
        if dtype == "auto" and len({each.compute_dtype for each in devices}) > 1:
            dtype = "float16"
        return replace(
            options,
            device=options.device if device.kind == "interpreter" else f"{device.kind}:{device.index}",
            activation_dtype=dtype,
            kv_cache_memory=None if memory is None else memory // size,
        )

    def facts_of(self, bundle: Bundle, options: BackendOptions) -> ModelFacts:
        """Return what can be known of an open bundle before it is compiled; see `ShardingBackend`."""
        return plan_of(bundle, options, choose_device(DeviceName.parse(options.device))).facts

    def blocks_of(self, bundle: Bundle, options: BackendOptions) -> int | None:
        """Return how many blocks are asked for; None where a GPU is measured. See `ShardingBackend`."""
        device = choose_device(DeviceName.parse(options.device))
        return None if _is_measured(options, device) else options.blocks_for(self.facts_of(bundle, options))

    def connect(self, options: BackendOptions, store: str, rank: int, size: int) -> Communicator:
        """Join the other ranks, by NCCL on GPUs and by gloo in the interpreter; see `ShardingBackend`."""
        device = choose_device(DeviceName.parse(options.device))
        if device.kind == "interpreter":
            return ThroughHost(GlooCommunicator(store, rank, size))
        with on_device(device.torch_device):
            return NcclCommunicator(store, rank, size, device.torch_device)

    def compile_shard(self, bundle: Bundle, options: BackendOptions, communicator: Communicator) -> TritonExecutable:
        """Make one rank's part of a bundle ready to run; see `ShardingBackend`."""
        return compile_bundle(bundle, options, choose_device(DeviceName.parse(options.device)), communicator)

    def memory_needs(self, bundle: Path, options: BackendOptions) -> MemoryNeeds:
        """Estimate from the graph what the bundle takes on the device; see `MemoryPlanner`.

        The values of a step are known when one has run; here they are bounded by the widest rows of the graph.
        """
        return self.memory_needs_of(Bundle.open(bundle), options)

    def memory_needs_of(
        self, opened: Bundle, options: BackendOptions, communicator: Communicator | None = None
    ) -> MemoryNeeds:
        """Return the same of an open bundle, or of one rank's part of it."""
        device = choose_device(DeviceName.parse(options.device))
        plan = plan_of(opened, options, device)
        facts = plan.facts
        longest = min(facts.max_model_len, options.max_model_len or facts.max_model_len)
        block_bytes = facts.bytes_per_token * options.block_size
        blocks = options.blocks_for(facts)
        return MemoryNeeds(
            weights=sum(stored.nbytes for stored in opened.stored.values()),
            state=block_bytes * blocks,
            step=_step_bytes(opened.graph, options.max_num_batched_tokens, plan.dtype)
            + 4 * _sum_floats(plan, plan.decode_limits(blocks, options), device),
            state_of_longest=block_bytes * min(-(-longest // options.block_size), blocks),
            device=None if device.kind == "interpreter" else _state(device),
        )


@dataclass(frozen=True)
class Plan:
    """What is known of a bundle before its weights are touched.

    dtype:    of activations
    kv_dtype: of pages
    kv_scaling: what of them has a scale of its own
    """

    facts: ModelFacts
    layers: Mapping[int, LayerShape]
    heads: Mapping[int, int]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kv_scaling: Scaling
    kv_scales: Mapping[int, KVScales]
    max_model_len: int

    def decode_limits(self, num_blocks: int, options: BackendOptions) -> DecodeLimits:
        """Return what a launch of decode attention may take, with a pool of so many blocks."""
        return DecodeLimits.of_pool(num_blocks * options.block_size, options.max_num_seqs, self.max_model_len)

    def head_shapes(self) -> set[HeadShape]:
        """Return the shapes of the layers' heads."""
        return {
            HeadShape(
                self.heads[layer],
                shape.num_kv_heads,
                shape.key_width,
                shape.value_width,
                self.dtype,
                self.kv_dtype,
                self.kv_scaling,
            )
            for layer, shape in self.layers.items()
        }


def compile_bundle(
    bundle: Bundle, options: BackendOptions, device: Device, communicator: Communicator | None = None
) -> TritonExecutable:
    """Make an executable of an open bundle.

    communicator: to the other ranks, where the bundle is one rank's part; all of them compile at the same time

    Raises OptionError for options out of range, BundleError when the manifest promises what the graph does not hold,
    BackendError when the graph cannot be lowered or the device has too little memory.
    """
    with on_device(device.torch_device):
        return _compiled(bundle, options, device, communicator)


def _compiled(
    bundle: Bundle, options: BackendOptions, device: Device, communicator: Communicator | None
) -> TritonExecutable:
    plan = plan_of(bundle, options, device)
    options.warn_of_unused(_LOG, bundle.path, f"on {device}", "threads", "pin")
    if not _is_measured(options, device):
        where = "on the CPU" if device.kind == "interpreter" else "where the size of the KV cache is given"
        options.warn_of_unused(_LOG, bundle.path, where, "gpu_memory_utilization")
    place = device.torch_device
    used_before = _used(device)
    constants = Constants(StaticValues(bundle.graph, bundle.tensor), place, plan.dtype)
    pool = LayerPool(plan.layers, plan.kv_scales, plan.kv_dtype, place, options.block_size)
    with out_of_memory_in_words(f"the weights of {bundle.path}"), torch.inference_mode():
        program = lower_graph(bundle.graph, constants, pool, plan.max_model_len, communicator)
    del constants  # what it keeps besides the program's tensors is of no use any more
    weights = _used(device) - used_before
    bundle.release()
    num_blocks = _num_blocks(program, pool, plan, options, device, weights)
    if communicator is not None and _is_measured(options, device):
        num_blocks = min(numbers_of_ranks(communicator, num_blocks, place))
    with out_of_memory_in_words(f"a KV cache of {num_blocks} blocks"):
        pool.allocate(num_blocks)
        executable = _executable(program, pool, plan, num_blocks, options, device)
    if device.kind != "interpreter" and program.stays_on_device:
        record: Record = CudaRecorder(place)
        memory = int(device.memory * RECORDINGS_SHARE)
        if communicator is not None:
            record = AgreeingRecorder(record, communicator, place)
            memory = min(numbers_of_ranks(communicator, memory, place))
        executable.record_decoding(record, max_sequences=options.max_num_seqs, memory=memory)
    _LOG.info(
        "%s: %d operations on %s, activations are %s, keys and values %s; weights take %.2f GB, %d blocks of %d "
        "tokens %.2f GB",
        bundle.path, len(program.instructions), device, _name(plan.dtype), _name(plan.kv_dtype), weights / 1e9,
        num_blocks, options.block_size, num_blocks * options.block_size * plan.facts.bytes_per_token / 1e9,
    )  # fmt: skip
    if program.waiting:
        _LOG.warning(
            "%s: decode steps are not recorded, for they wait for numbers that the device computes: %s",
            bundle.path, ", ".join(f"{name} ({count})" for name, count in sorted(program.waiting.items())),
        )  # fmt: skip
    if program.fallbacks:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(program.fallbacks.items()))
        _LOG.warning("%s: run by onnx.reference on the CPU, slowly, for want of a kernel: %s", bundle.path, names)
    return executable


def plan_of(bundle: Bundle, options: BackendOptions, device: Device) -> Plan:
    """Return what a bundle will be run with. Raises BundleError, BackendError and OptionError as `compile_bundle`."""
    architecture = bundle.manifest.architecture
    max_model_len, independent = architecture.get("max_model_len"), architecture.get("length_independent_up_to")
    if not isinstance(max_model_len, int) or max_model_len < 1:
        raise BundleError(
            f"{bundle.path}: bundle.json: architecture.max_model_len is {max_model_len!r}, expected a number"
        )
    graph = bundle.graph
    check_nodes(graph)
    check_positions(graph, max_model_len, str(bundle.path / GRAPH_FILE))
    layers, scales = layer_shapes(graph), calibrated_scales(options.kv_cache_dtype, kv_scales_of(graph))
    dtype = _activation_dtype(options, device)
    kv_dtype = _kv_dtype(options, scales, dtype)
    scaling: Scaling = "none" if kv_dtype in ACTIVATION_DTYPES.values() else "head" if scales else "token"
    facts = ModelFacts(
        vocab_size=_vocab_size(bundle),
        max_model_len=max_model_len,
        num_layers=len(layers),
        bytes_per_token=sum(
            bytes_per_slot(shape.num_kv_heads, shape.key_width, shape.value_width, kv_dtype, scaling)
            for shape in layers.values()
        ),
        length_independent_up_to=independent if isinstance(independent, int) else None,
    )
    heads = {
        node.attributes.get_int("layer"): node.attributes.get_int("num_heads")
        for node in graph
        if node.domain == DOMAIN and node.op_type == "Attention"
    }
    longest = min(max_model_len, options.max_model_len or max_model_len)
    return Plan(facts, layers, heads, dtype, kv_dtype, scaling, scales, longest)


def _activation_dtype(options: BackendOptions, device: Device) -> torch.dtype:
    if options.activation_dtype == "auto":
        return device.compute_dtype
    if options.activation_dtype not in ACTIVATION_DTYPES:
        raise OptionError(
            f"activation_dtype={options.activation_dtype!r}; on {device} it is auto, {', '.join(ACTIVATION_DTYPES)}; "
            "INT8 activations on a GPU come from the bundle: convert with smoothquant-int8 or int8-dynamic"
        )
    return ACTIVATION_DTYPES[options.activation_dtype]


def _kv_dtype(options: BackendOptions, scales: Mapping[int, KVScales], dtype: torch.dtype) -> torch.dtype:
    if options.kv_cache_dtype not in ("auto", *KV_CACHE_DTYPES):
        raise OptionError(f"kv_cache_dtype={options.kv_cache_dtype!r}; expected auto, {', '.join(KV_CACHE_DTYPES)}")
    if scales:
        return PAGE_TYPES[next(iter(scales.values())).format]
    return dtype if options.kv_cache_dtype == "auto" else KV_CACHE_DTYPES[options.kv_cache_dtype]


def _is_measured(options: BackendOptions, device: Device) -> bool:
    """Tell whether the pool gets what memory of a GPU is left, rather than a size that is asked for."""
    return device.kind != "interpreter" and options.num_blocks is None and options.kv_cache_memory is None


def _num_blocks(
    program: Program, pool: LayerPool, plan: Plan, options: BackendOptions, device: Device, weights: int
) -> int:
    """Return how many blocks the pool gets: as asked, else what memory is left when a largest step has run."""
    if not _is_measured(options, device):
        return options.blocks_for(plan.facts)
    place = device.torch_device
    batch = _largest_step(plan, options)
    with out_of_memory_in_words(f"a step of {options.max_num_batched_tokens} tokens, tried to measure it,"):
        pool.allocate(int(batch.block_tables.max()) + 1)
        executable = _executable(program, pool, plan, int(batch.block_tables.max()) + 1, options, device)
        before = torch.cuda.memory_allocated(place)
        torch.cuda.reset_peak_memory_stats(place)
        executable.step(batch)  # which copies the logits as float32
        executable.launch(batch, _any_draws(len(batch.logit_rows))).result()
    step = torch.cuda.max_memory_allocated(place) - before
    del executable
    pool.allocate(0)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(place)
    memory = DeviceMemory(
        total=total,
        others=max(total - free - weights, 0),  # models that this process has loaded before are others, too
        weights=weights,
        step=step,
        recordings=int(total * RECORDINGS_SHARE) if program.stays_on_device else 0,
    )

    def blocks_of(pool_bytes: int) -> int:
        return replace(options, kv_cache_memory=pool_bytes).blocks_for(plan.facts)

    memory = memory.with_sums(
        options.gpu_memory_utilization,
        lambda left: 4 * _sum_floats(plan, plan.decode_limits(blocks_of(left), options), device),
    )
    _LOG.info("memory of %s: %s", device, memory)
    return blocks_of(memory.for_pool(options.gpu_memory_utilization))


def _sum_floats(plan: Plan, limits: DecodeLimits, device: Device) -> int:
    """Return the floats that decode attention of the layers, one after the other, needs for its sums."""
    place, longest = device.torch_device, plan.max_model_len
    return max((most_floats(shape, place, limits, longest) for shape in plan.head_shapes()), default=0)


def _largest_step(plan: Plan, options: BackendOptions) -> StepBatch:
    """Return a step of as many tokens as a step may have, in as few sequences as hold them."""
    tokens = options.max_num_batched_tokens
    length = min(plan.max_model_len, tokens)
    lengths = [length] * (tokens // length) + ([tokens % length] if tokens % length else [])
    lengths = lengths[: options.max_num_seqs]
    blocks = [-(-count // options.block_size) for count in lengths]
    tables = np.full((len(lengths), max(blocks)), -1, np.int32)
    first = 0
    for row, count in enumerate(blocks):
        tables[row, :count] = np.arange(first, first + count)
        first += count
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    positions = np.concatenate([np.arange(count) for count in lengths]).astype(np.int32)
    return StepBatch(
        token_ids=np.zeros(offsets[-1], np.int32),
        positions=positions,
        sequence_offsets=offsets,
        context_lengths=np.array(lengths, np.int32),
        block_tables=tables,
        logit_rows=np.arange(min(int(offsets[-1]), options.max_num_seqs), dtype=np.int32),
        prompt_lengths=np.repeat(lengths, lengths).astype(np.int32),
    )


def _any_draws(rows: int) -> Draws:
    """Return draws for which sampling takes the most memory."""
    ones = np.ones(rows)
    return Draws(ones, np.zeros(rows, np.int32), ones * 0.9, np.zeros(rows), ones * 0.5)


def _executable(
    program: Program, pool: LayerPool, plan: Plan, num_blocks: int, options: BackendOptions, device: Device
) -> TritonExecutable:
    limits = plan.decode_limits(num_blocks, options)
    return TritonExecutable(
        program,
        pool,
        plan.facts,
        num_blocks=num_blocks,
        heads=plan.heads,
        device=device.torch_device,
        dtype=plan.dtype,
        max_model_len=plan.max_model_len,
        sums=SplitSums.allocate(_sum_floats(plan, limits, device), limits, device.torch_device),
        hidden_size=program.hidden_size,
    )


def _state(device: Device) -> DeviceState:
    free, total = torch.cuda.mem_get_info(device.torch_device)
    return DeviceState(str(device), free, total)


def _used(device: Device) -> int:
    return 0 if device.kind == "interpreter" else int(torch.cuda.memory_allocated(device.torch_device))


def _step_bytes(graph: Graph, tokens: int, dtype: torch.dtype) -> int:
    """Bound the values of a step: three of the widest rows are alive at once, and float32 logits."""
    widths = [value.shape[-1] for node in graph for value in node.outputs if value.shape and len(value.shape) > 1]
    widest = max((width for width in widths if isinstance(width, int)), default=0)
    return 3 * tokens * widest * dtype.itemsize


def _vocab_size(bundle: Bundle) -> int:
    shape = bundle.graph.outputs[0].shape if bundle.graph.outputs else None
    width = shape[-1] if shape else None
    if not isinstance(width, int) or width < 1:
        raise BackendError(f"{bundle.path / GRAPH_FILE}: the logits have shape {shape}; expected [rows, vocabulary]")
    return width


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
