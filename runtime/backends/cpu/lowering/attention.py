"""Attention over the layer state, with rotary embedding of queries and keys computed along where it stands before."""

from __future__ import annotations

import numpy as np

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.errors import BackendError
from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.cpu.lowering.context import AttributeValue, Lowering, input_of
from inferencex.runtime.backends.cpu.lowering.extents import Extent
from inferencex.runtime.backends.cpu.lowering.views import Storage, View, constant_view
from inferencex.runtime.backends.graph.rotation import rotation_in_front


def absorb_rotations(lowering: Lowering) -> None:
    """Mark the rotary embeddings that attention will compute along."""
    for node in lowering.graph:
        if node.domain != DOMAIN or node.op_type != "Attention":
            continue
        for place, attribute in ((0, "num_heads"), (1, "num_kv_heads")):
            rotation = rotation_in_front(
                lowering.graph, lowering.static, node.inputs[place], node.attributes.get_int(attribute)
            )
            if rotation is not None:
                lowering.absorbed.update(value.name for step in rotation.path for value in step.outputs)


def lower_attention(lowering: Lowering, node: Node) -> bool:
    """Lower one Attention node: the new keys and values into the state, then the queries over it."""
    attributes = node.attributes
    layer = attributes.get_int("layer")
    heads, kv_heads = attributes.get_int("num_heads"), attributes.get_int("num_kv_heads")
    shape = lowering.layers[layer]
    state = lowering.states.setdefault(layer, Storage(Extent(0), layer=layer))
    state_view = View(state, "u8", (), ())
    place: dict[str, AttributeValue] = {
        "layer": layer,
        "num_kv_heads": kv_heads,
        "key_width": shape.key_width,
        "value_width": shape.value_width,
        "block_size": lowering.options.block_size,
        "num_blocks": lowering.options.num_blocks,
        "kv_dtype": lowering.options.kv_dtype,
        "block_stride": lowering.block_stride,
    }
    name = node.outputs[0].name
    if attributes.get_int("writes", 1):
        keys, rotary, turn = _rotated(lowering, node, 1, kv_heads)
        values = _heads(lowering, lowering.view(node.inputs[2]), kv_heads, name)
        scales = _scales(lowering, layer)
        lowering.emit("StoreKV", f"{name}.state", [keys, values, *rotary, state_view, *scales], [], **place, **turn)
    queries, rotary, turn = _rotated(lowering, node, 0, heads)
    y = lowering.define(node.outputs[0], "f32", (queries.dims[0], Extent(heads * shape.value_width)))
    lowering.emit(
        "Attention",
        name,
        [queries, lowering.optional_view(node, 3), lowering.optional_view(node, 4), *rotary, state_view],
        [y],
        **place,
        **turn,
        num_heads=heads,
        scale=float(attributes.get_float("scale")),
        window=attributes.get_int("window", 0),
        chunk=attributes.get_int("chunk", 0),
        softcap=float(attributes.get_float("softcap", 0.0)),
        max_tokens=lowering.options.max_tokens,
        max_seqs=lowering.options.max_seqs,
        max_context=lowering.options.max_model_len,
    )
    return True


def _scales(lowering: Lowering, layer: int) -> list[View]:
    """Return the scales `[G]` that keys and values of a layer are kept with; nothing where they are not calibrated."""
    scales = lowering.options.kv_scales.get(layer)
    if scales is None:
        return []
    return [constant_view(np.array(numbers, dtype=np.float32), "f32") for numbers in (scales.keys, scales.values)]


def _rotated(
    lowering: Lowering, node: Node, place: int, heads: int
) -> tuple[View, list[View | None], dict[str, AttributeValue]]:
    """Return queries or keys `[T, heads, width]`, and the rotation still to be applied: cos, sin, positions."""
    name = node.outputs[0].name
    rotation = rotation_in_front(lowering.graph, lowering.static, node.inputs[place], heads)
    if rotation is None:
        view = _heads(lowering, lowering.view(node.inputs[place]), heads, name)
        return view, [None, None, None], {"dim": 0, "interleaved": 0}
    source = lowering.view(rotation.source)
    tokens = Extent(1)
    for size in source.dims[:-1]:
        tokens = tokens * size
    flat = source.reshaped((tokens, source.dims[-1]))
    if flat is None:
        flat = lowering.contiguous(source, name).reshaped((tokens, source.dims[-1]))
    assert flat is not None, "a contiguous value can be reshaped"
    cos, sin, positions = rotation_inputs(lowering, rotation.node)
    attributes: dict[str, AttributeValue] = {
        "dim": rotation.node.attributes.get_int("rotary_embedding_dim", 0),
        "interleaved": rotation.node.attributes.get_int("interleaved", 0),
    }
    return _heads(lowering, flat, heads, name), [cos, sin, positions], attributes


def rotation_inputs(lowering: Lowering, node: Node) -> tuple[View, View, View | None]:
    """Return cos and sin `[P, half]` and positions `[T]` of a RotaryEmbedding, or cos and sin `[T, half]` alone."""
    name = node.outputs[0].name
    by_position = input_of(node, 3) is not None
    cos, sin = (lowering.contiguous(_table(lowering, node.inputs[i], by_position), name) for i in (1, 2))
    if by_position:
        positions = lowering.contiguous(lowering.view(node.inputs[3]), name)
        flat = positions.reshaped((positions.dims[0] * positions.dims[-1],)) if positions.rank == 2 else positions
        assert flat is not None
        return cos, sin, flat
    half = cos.dims[-1]
    tokens = cos.dims[-2]
    flat_cos, flat_sin = (view.reshaped((tokens, half)) for view in (cos, sin))
    if flat_cos is None or flat_sin is None:
        raise BackendError(f"rotary embedding {name!r}: tables of shape {[str(d) for d in cos.dims]} were not expected")
    return flat_cos, flat_sin, None


def _table(lowering: Lowering, value: Value | None, by_position: bool) -> View:
    """Return cosines or sines; of a computed table, with the rows of the positions that the program is made for."""
    if not by_position or value is None or value not in lowering.static:
        return lowering.view(value)
    found = lowering.tables.get(value.name)  # all layers read the same
    if found is None:
        rows = lowering.static.rows(value, lowering.options.max_model_len)
        found = lowering.view(value) if rows is None else constant_view(rows, "f32")
        lowering.tables[value.name] = found
    return found


def _heads(lowering: Lowering, view: View, heads: int, name: str) -> View:
    """Return `[T, heads, width]` of a matrix `[T, heads * width]`."""
    view = lowering.with_contiguous_rows(view, name)
    width = view.dims[-1].coefficient
    if view.rank != 2 or width % heads:
        raise BackendError(f"attention {name!r}: {width} features for {heads} heads")
    dims = (view.dims[0], Extent(heads), Extent(width // heads))
    split = view.reshaped(dims) or lowering.contiguous(view, name).reshaped(dims)
    assert split is not None, "the last dimension is contiguous"
    return split


def lower_rotary(lowering: Lowering, node: Node) -> bool:
    """Lower a RotaryEmbedding that stands alone, on `[1, T, H * D]`."""
    x = lowering.view(node.inputs[0])
    heads = node.attributes.get_int("num_heads", 0)
    name = node.outputs[0].name
    if x.rank != 3 or x.dims[0] != Extent(1) or heads < 1:
        return False
    tokens, features = x.dims[1], x.dims[2]
    flat = x.reshaped((tokens, features)) or lowering.contiguous(x, name).reshaped((tokens, features))
    assert flat is not None
    queries = _heads(lowering, flat, heads, name)
    cos, sin, positions = rotation_inputs(lowering, node)
    y = lowering.allocate("f32", queries.dims)
    lowering.emit(
        "RotaryEmbedding",
        name,
        [queries, cos, sin, positions],
        [y],
        dim=node.attributes.get_int("rotary_embedding_dim", 0),
        interleaved=node.attributes.get_int("interleaved", 0),
    )
    result = y.reshaped(x.dims)
    assert result is not None
    lowering.views[node.outputs[0].name] = result
    return True
