"""The parts of fixed values that a rank's graph reads: initializers, and what nodes make of them alone."""

from __future__ import annotations

import numpy as np

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.dtypes import DataType
from inferencex.formats.graph import Node, Value, to_array
from inferencex.runtime.parallel.editing import GraphBuilder
from inferencex.runtime.parallel.graph_facts import GraphFacts
from inferencex.runtime.parallel.parts import Part, Shape, indices, is_whole, positions, shape_of, whole
from inferencex.runtime.parallel.rules import RULES, Needs
from inferencex.runtime.parallel.rules.contract import unchanged
from inferencex.runtime.parallel.tensors import TensorCut


def take(builder: GraphBuilder, value: Value, shape: Shape, have: Part, want: Part) -> Value:
    """Return `want` of a value of which there is `have`."""
    wanted = shape_of(shape, want)
    name = f"{value.name}.taken"
    current = value
    held = list(shape_of(shape, have))
    for axis, (outer, inner) in enumerate(zip(have, want, strict=True)):
        if inner is None or inner == outer:
            continue
        places = positions(inner, outer)
        held[axis] = wanted[axis]
        typed = (name, value.dtype, tuple(held))
        if len(places) == 1:
            bounds = [builder.constant(np.array([entry], dtype=np.int64)) for entry in (*places[0], axis)]
            (current,) = builder.add("Slice", [current, *bounds], [typed])
        else:
            chosen = builder.constant(indices(places))
            (current,) = builder.add("Gather", [current, chosen], [typed], {"axis": axis})
    return current


class FixedValues:
    """Makes parts of fixed values when they are first asked for. A value may be wanted in several parts.

    tensors: by name in the rank's graph, what its stored initializers are parts of
    """

    def __init__(self, builder: GraphBuilder, facts: GraphFacts) -> None:
        self._builder, self._facts = builder, facts
        self._static: dict[tuple[str, Part], Value] = {}
        self.tensors: dict[str, TensorCut] = {}

    def read(self, value: Value, part: Part) -> Value:
        """Return a part of a value that is the same in every step."""
        key = (value.name, part)
        if key not in self._static:
            self._static[key] = self._make_fixed(value, part)
        return self._static[key]

    def _make_fixed(self, value: Value, part: Part) -> Value:
        node = value.producer()
        if node is None:
            return self._initializer(value, part)
        needs = Needs(tuple(unchanged(node, self._facts)))
        if not is_whole(part):
            rule = RULES.get((node.domain, node.op_type))
            found = None if rule is None or len(node.outputs) != 1 else rule(node, [part], self._facts)
            if found is None or found.selects is not None:
                return take(
                    self._builder,
                    self.read(value, whole(len(part))),
                    self._facts.shape(value) or (),
                    whole(len(part)),
                    part,
                )
            needs = found
        inputs: list[Value | None] = []
        for place, (source, wanted) in enumerate(zip(node.inputs, needs.inputs, strict=True)):
            if place in needs.constants:
                inputs.append(self._builder.constant(needs.constants[place]))
            elif source is None or wanted is None:
                inputs.append(None)
            elif (node.domain, node.op_type) == (DOMAIN, "UnpackBits") and source.producer() is None:
                inputs.append(self._stream(node, source, wanted))
            else:
                inputs.append(self.read(source, wanted))
        outputs = []
        for output in node.outputs:
            shape = self._facts.shape(output)
            of_output = part if output is value else whole(len(shape or ()))
            outputs.append((output.name, output.dtype, None if shape is None else shape_of(shape, of_output)))
        made = self._builder.copy(node, inputs, outputs, needs.attributes)
        for output, result in zip(node.outputs, made, strict=True):
            if output is not value:
                self._static[output.name, whole(len(self._facts.shape(output) or ()))] = result
        return made[node.outputs.index(value)]

    def _initializer(self, value: Value, part: Part) -> Value:
        shape = tuple(size for size in value.shape or () if isinstance(size, int))
        if value.constant is not None:
            array = to_array(value.constant)
            for axis, ranges in enumerate(part):
                if ranges is not None:
                    array = array.take(indices(ranges), axis=axis)
            return self._builder.initializer(value.name, value.dtype, None, array)
        assert value.dtype is not None, "an initializer has a type"
        cut = TensorCut(value.name, value.dtype, shape, value.dtype.bitwidth, part)
        made = self._builder.initializer(value.name, value.dtype, cut.cut_shape, None)
        self.tensors[made.name] = cut
        return made

    def _stream(self, node: Node, value: Value, part: Part) -> Value:
        """Return a part of a stream of bits, said in the shape of the integers in it."""
        key = (value.name, part)
        if key not in self._static:
            shape, bits = tuple(node.attributes.get_ints("shape")), node.attributes.get_int("bits")
            cut = TensorCut(value.name, DataType.UINT8, shape, bits, part)
            self._static[key] = self._builder.initializer(value.name, value.dtype, (cut.nbytes,), None)
            self.tensors[self._static[key].name] = cut
        return self._static[key]
