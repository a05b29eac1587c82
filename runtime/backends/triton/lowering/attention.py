"""Attention over pages, with rotary embedding of queries and keys where it stands right in front."""

from __future__ import annotations

import torch
from torch import Tensor

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.graph.rotation import Rotation, rotation_in_front
from inferencex.runtime.backends.triton.kernels.attention import attention
from inferencex.runtime.backends.triton.kernels.kv_write import rope_write, write_kv
from inferencex.runtime.backends.triton.kernels.rope import rope
from inferencex.runtime.backends.triton.lowering.context import Lowering, Read, input_of
from inferencex.runtime.backends.triton.lowering.program import Values
from inferencex.runtime.backends.triton.step_inputs import StepInputs


def lower_attention(lowering: Lowering, node: Node) -> bool:
    """Lower one Attention node: the new keys and values into the pages, then the queries over them."""
    attributes, constants = node.attributes, lowering.constants
    heads, kv_heads = attributes.get_int("num_heads"), attributes.get_int("num_kv_heads")
    layer, writes = attributes.get_int("layer"), bool(attributes.get_int("writes", 1))
    options = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "scale": attributes.get_float("scale"),
        "window": attributes.get_int("window", 0),
        "chunk": attributes.get_int("chunk", 0),
        "softcap": attributes.get_float("softcap", 0.0),
        "sinks": constants.float_vector(input_of(node, 3)),
        "slopes": constants.float_vector(input_of(node, 4)),
    }
    pages = lowering.pages
    turned = _fused_rotation(lowering, node) if writes else None
    if turned is not None:
        q_turn, k_turn = turned
        rotate = _rotary(lowering, q_turn.node)
        q, k = lowering.activations(q_turn.source), lowering.activations(k_turn.source)
        v = lowering.activations(node.inputs[2])
        reads = [q_turn.source, k_turn.source, node.inputs[2], q_turn.node.inputs[3]]

        def run_fused(values: Values, step: StepInputs) -> tuple[Tensor]:
            rows, keys = _matrix(q(values)), _matrix(k(values))
            turned_rows = rope_write(
                rows, keys, v(values), pages(layer), step.attention.slots, rotate.cos, rotate.sin,
                rotate.positions(values).reshape(-1), num_heads=heads, num_kv_heads=kv_heads,
                interleaved=rotate.interleaved, width=rotate.width,
                out=torch.empty_like(rows),  # others may read the queries as they were, or what they are a view of
            )  # fmt: skip
            return (attention(turned_rows, pages(layer), step.attention, **options),)  # type: ignore[arg-type]

        lowering.emit(node, "triton", run_fused, reads=reads)
        return True
    q, k, v = (lowering.activations(node.inputs[place]) for place in range(3))

    def run(values: Values, step: StepInputs) -> tuple[Tensor]:
        if writes:
            write_kv(k(values), v(values), pages(layer), step.attention.slots)
        return (attention(q(values), pages(layer), step.attention, **options),)  # type: ignore[arg-type]

    lowering.emit(node, "triton", run, reads=node.inputs[: 3 if writes else 1])
    return True


class _Rotary:
    """What a RotaryEmbedding node says."""

    def __init__(self, lowering: Lowering, node: Node) -> None:
        rows = lowering.max_model_len
        cos, sin = node.inputs[1], node.inputs[2]
        assert cos is not None and sin is not None
        self.cos, self.sin = lowering.constants.table(cos, rows), lowering.constants.table(sin, rows)
        self.positions: Read = lowering.read(node.inputs[3])
        self.interleaved = bool(node.attributes.get_int("interleaved", 0))
        self.heads = node.attributes.get_int("num_heads", 0)
        self.width = node.attributes.get_int("rotary_embedding_dim", 0)


def _rotary(lowering: Lowering, node: Node) -> _Rotary:
    return _Rotary(lowering, node)


def _fused_rotation(lowering: Lowering, node: Node) -> tuple[Rotation, Rotation] | None:
    """Return the rotations of queries and keys where both are alike and stand right in front of attention."""
    static, graph = lowering.constants.static, lowering.graph
    found = [
        rotation_in_front(graph, static, node.inputs[place], node.attributes.get_int(attribute))
        for place, attribute in ((0, "num_heads"), (1, "num_kv_heads"))
    ]
    q, k = found
    if q is None or k is None or q.node.inputs[1:] != k.node.inputs[1:]:
        return None
    if any(len(turn.node.inputs[0].shape or ()) != 3 for turn in (q, k) if turn.node.inputs[0] is not None):
        return None
    alike = ("interleaved", "rotary_embedding_dim")
    if any(q.node.attributes.get_int(name, 0) != k.node.attributes.get_int(name, 0) for name in alike):
        return None
    return q, k


def lower_rotary(lowering: Lowering, node: Node) -> bool:
    """Lower a rotation that attention does not compute along, of `[1, T, heads * D]` with tables of angles."""
    x_value: Value | None = node.inputs[0]
    if x_value is None or len(x_value.shape or ()) != 3 or x_value.shape is None or x_value.shape[0] != 1:
        return False
    if input_of(node, 3) is None or any(not lowering.is_static(node.inputs[i]) for i in (1, 2)):
        return False
    rotate, x = _rotary(lowering, node), lowering.activations(x_value)

    def run(values: Values, step: StepInputs) -> tuple[Tensor]:
        positions = rotate.positions(values).reshape(-1)
        rows = _matrix(x(values))
        turned = rope(
            rows, rotate.cos, rotate.sin, positions, rotate.heads, interleaved=rotate.interleaved, width=rotate.width
        )
        return (turned[None],)

    lowering.emit(node, "triton", run, reads=[x_value, node.inputs[3]])
    return True


def _matrix(x: Tensor) -> Tensor:
    """Return activations `[1, T, W]` or `[T, W]` as `[T, W]`."""
    return x.reshape(-1, x.shape[-1])


HANDLERS = {("", "RotaryEmbedding"): (lower_rotary,), (DOMAIN, "Attention"): (lower_attention,)}
