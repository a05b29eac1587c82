"""Steps over sequences laid out in blocks, and a graph of attention layers to run them on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from inferencex.formats import dialect
from inferencex.formats.graph import read_graph
from inferencex.runtime.backends.base import BackendOptions, Float32Array, ModelFacts, StepBatch
from inferencex.runtime.backends.cpu.executable import CpuExecutable, begin_program
from inferencex.runtime.backends.cpu.lowering import LoweringOptions, kv_scales_of, layer_shapes, lower_graph
from inferencex.runtime.backends.cpu.native import _cpu
from inferencex.runtime.backends.reference.executable import ReferenceExecutable

Chunk = tuple[int, int, int]  # sequence, first position, number of tokens
HEADS, GROUPS, KEY_DIM, VALUE_DIM = 4, 2, 6, 5
VOCAB, BLOCK_SIZE, NUM_BLOCKS = 11, 4, 24


def initializer(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


class Model:
    """Embedding, then layers of attention that are summed, then the rows that are asked for."""

    def __init__(self) -> None:
        dialect.register()
        self.rng = np.random.default_rng(0)
        opsets = {"": dialect.OPSET, dialect.DOMAIN: dialect.VERSION}
        self.graph = ir.Graph([], [], nodes=[], opset_imports=opsets, name="test")
        for name, size in (("token_ids", "tokens"), ("positions", "tokens"), ("logit_rows", "rows")):
            self.graph.inputs.append(ir.Value(name=name, shape=ir.Shape([size]), type=ir.TensorType(ir.DataType.INT64)))
        self.ids, self.positions, self.rows = self.graph.inputs

    def weight(self, *shape: int) -> ir.Value:
        array = self.rng.standard_normal(shape).astype(np.float32)
        return initializer(self.graph, f"w{len(self.graph.initializers)}", array)

    def node(
        self, op_type: str, *inputs: ir.Value | None, shape: Sequence[int | str], domain: str = "", **attributes: Any
    ) -> ir.Value:
        output = ir.Value(
            name=f"{op_type}_{len(self.graph)}", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT)
        )
        self.graph.append(ir.node(op_type, list(inputs), attributes, domain=domain, outputs=[output]))
        return output

    def embed(self, features: int) -> ir.Value:
        return self.node("Gather", self.weight(VOCAB, features), self.ids, shape=["tokens", features])

    def keys(self) -> tuple[ir.Value, ir.Value]:
        return self.embed(GROUPS * KEY_DIM), self.embed(GROUPS * VALUE_DIM)

    def attention(
        self, layer: int, k: ir.Value, v: ir.Value, *extra: ir.Value | None, writes: int = 1, **attributes: Any
    ) -> ir.Value:
        plain = {"layer": layer, "writes": writes, "num_heads": HEADS, "num_kv_heads": GROUPS, "scale": 0.4}
        q = self.embed(HEADS * KEY_DIM)
        width = HEADS * VALUE_DIM
        return self.node(
            "Attention", q, k, v, *extra, shape=["tokens", width], domain=dialect.DOMAIN, **plain, **attributes
        )

    def finish(self, y: ir.Value, features: int) -> ir.Model:
        logits = self.node("Gather", y, self.rows, shape=["rows", features], axis=0)
        logits.name = "logits"
        self.graph.outputs.append(logits)
        return ir.Model(self.graph, ir_version=11)


def compiled(
    model: ir.Model, *, num_blocks: int = NUM_BLOCKS, block_size: int = BLOCK_SIZE, **kwargs: Any
) -> ReferenceExecutable:
    return ReferenceExecutable(
        model, BackendOptions(num_blocks=num_blocks, block_size=block_size), max_model_len=64, **kwargs
    )


def compiled_cpu(
    model: ir.Model,
    *,
    num_blocks: int = NUM_BLOCKS,
    block_size: int = BLOCK_SIZE,
    integer_activations: bool = False,
    threads: int = 2,
) -> CpuExecutable:
    """Return the model on the CPU backend; its weights are constants inside the graph."""
    graph = read_graph(ir.to_proto(model))
    layers = layer_shapes(graph)
    scales = kv_scales_of(graph)
    kv_dtype = "float16" if scales else "float32"  # which holds FP8
    options = LoweringOptions(integer_activations, kv_dtype, 64, 4, 64, num_blocks, block_size, scales)
    vocab_size = int(graph.outputs[0].shape[-1])  # type: ignore[index, arg-type]
    per_token = sum(4 * shape.num_kv_heads * (shape.key_width + shape.value_width) for shape in layers.values())
    facts = ModelFacts(vocab_size, 64, len(layers), per_token)

    def nothing(name: str) -> NDArray[Any]:
        raise AssertionError(f"{name} is a constant inside the graph")

    return CpuExecutable(begin_program(threads, []), lower_graph(graph, nothing, options), options, facts)


WAYS = ("reference", *_cpu.available_isas())
"""The reference backend, and the CPU backend with each kind of kernels that this machine runs."""


class Runner(Protocol):
    """Runs steps, and lets what it returns be kept."""

    facts: ModelFacts

    def step(self, batch: StepBatch) -> Float32Array: ...


@dataclass
class _Keeping:
    """An executable whose logits may be kept."""

    executable: CpuExecutable

    @property
    def facts(self) -> ModelFacts:
        return self.executable.facts

    def step(self, batch: StepBatch) -> Float32Array:
        return self.executable.step(batch).copy()


def compiled_as(way: str, model: ir.Model, *, num_blocks: int = NUM_BLOCKS, block_size: int = BLOCK_SIZE) -> Runner:
    """Return the model compiled in one of `WAYS`."""
    if way == "reference":
        return compiled(model, num_blocks=num_blocks, block_size=block_size)
    with mock.patch.dict(os.environ, INFERENCEX_ISA=way):
        return _Keeping(compiled_cpu(model, num_blocks=num_blocks, block_size=block_size))


def tables(lengths: Sequence[int], block_size: int = BLOCK_SIZE, seed: int | None = None) -> list[list[int]]:
    """Hand out the blocks of a pool, in order or shuffled."""
    counts = [-(-length // block_size) for length in lengths]
    order = np.arange(sum(counts)) if seed is None else np.random.default_rng(seed).permutation(sum(counts))
    pool = iter(int(block) for block in order)
    return [[next(pool) for _ in range(count)] for count in counts]


def batch(
    chunks: Sequence[Chunk],
    sequences: Sequence[Sequence[int]],
    blocks: Sequence[Sequence[int]],
    rows: Sequence[int] | None = None,
) -> StepBatch:
    """Lay chunks out as one step; all rows are asked for unless `rows` says which."""
    ids = [t for s, first, size in chunks for t in sequences[s][first : first + size]]
    width = max(len(blocks[s]) for s, _, _ in chunks)
    return StepBatch(
        token_ids=np.array(ids, np.int32),
        positions=np.array([p for _, first, size in chunks for p in range(first, first + size)], np.int32),
        sequence_offsets=np.cumsum([0, *(size for _, _, size in chunks)]).astype(np.int32),
        context_lengths=np.array([first + size for _, first, size in chunks], np.int32),
        block_tables=np.array([[*blocks[s], *[-1] * (width - len(blocks[s]))] for s, _, _ in chunks], np.int32),
        logit_rows=np.arange(len(ids), dtype=np.int32) if rows is None else np.array(rows, np.int32),
        prompt_lengths=np.array([len(sequences[s]) for s, _, size in chunks for _ in range(size)], np.int32),
    )


def random_sequences(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [[int(t) for t in rng.integers(0, VOCAB, length)] for length in lengths]
