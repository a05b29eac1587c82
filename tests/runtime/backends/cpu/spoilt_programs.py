"""Lowered programs with one thing wrong, as no lowering makes them: the native module must not believe any of it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from inferencex.runtime.backends.cpu.lowering import Instruction, LoweredProgram
from inferencex.runtime.backends.cpu.lowering.extents import Extent, Symbol
from inferencex.runtime.backends.cpu.lowering.views import ITEM_SIZES, View

_SIZES = (0, 1, 2, 3, 7, 8, 63, 64, 65, 128, 1 << 20, 1 << 40)
_INTEGERS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 63, 64, 65, 2**20, 2**31, 2**40, 2**62, 2**63 - 1)
_REALS = (float("nan"), float("inf"), -1.0, 0.0, 1e-45, 0.5, 1e30)
_TEXTS = ("", "silu", "swiglu_clamped", "interleaved", "int8", "int4", "f32", "bf16", "float16", "x" * 300)


def spoilt(program: LoweredProgram, seed: int) -> tuple[LoweredProgram, str]:
    """Return the program with an instruction changed, and what was changed."""
    rng = random.Random(seed)
    instructions = list(program.instructions)
    # One of each kind is as likely as another, however often it occurs.
    kind = rng.choice(sorted({instruction.kind for instruction in instructions}))
    place = rng.choice([i for i, instruction in enumerate(instructions) if instruction.kind == kind])
    old = instructions[place]
    change = rng.choice([_change_view, _change_view, _change_view, _other_operand, _change_attribute, _change_kind])
    instructions[place], what = change(old, program, rng)
    return replace(program, instructions=tuple(instructions)), f"{old.kind} {old.name}: {what}"


def _change_view(old: Instruction, program: LoweredProgram, rng: random.Random) -> tuple[Instruction, str]:
    operands = [*old.inputs, *old.outputs]
    places = [i for i, view in enumerate(operands) if view is not None and view.storage.layer is None]
    if not places:
        return old, "nothing to change"
    place = rng.choice(places)
    view = operands[place]
    assert view is not None
    operands[place] = _changed(view, rng)
    inputs = len(old.inputs)
    changed = replace(old, inputs=tuple(operands[:inputs]), outputs=tuple(operands[inputs:]))
    return changed, f"operand {place} {_shown(view)} became {_shown(operands[place])}"


def _changed(view: View, rng: random.Random) -> View:
    action = rng.choice(["dim", "dim", "stride", "offset", "dtype", "rank", "order"])
    dims, strides = list(view.dims), list(view.strides)
    axis = rng.randrange(len(dims)) if dims else 0
    if action == "dtype":
        return replace(view, dtype=rng.choice(sorted(ITEM_SIZES)))
    if action == "offset":
        return replace(view, offset=view.offset + rng.choice([1, 3, 64, 1 << 20, 1 << 40]))
    if action == "rank" or not dims:
        added = rng.choice([1, 2])
        return replace(view, dims=(*[Extent(1)] * added, *dims), strides=(*[Extent(0)] * added, *strides))
    if action == "order":
        order = rng.sample(range(len(dims)), len(dims))
        return view.transposed(order)
    changed = strides if action == "stride" else dims
    size = rng.choice([rng.choice(_SIZES), changed[axis].coefficient + rng.choice([-1, 1]), changed[axis].coefficient])
    changed[axis] = Extent(max(size, 0), rng.choice([changed[axis].symbol, *Symbol]))
    return replace(view, dims=tuple(dims), strides=tuple(strides))


def _other_operand(old: Instruction, program: LoweredProgram, rng: random.Random) -> tuple[Instruction, str]:
    """Leave an operand out, add one, or put another instruction's in its place; results stay in the arena."""
    everywhere = [view for instruction in program.instructions for view in (*instruction.inputs, *instruction.outputs)]
    in_arena = [view for view in everywhere if view is not None and view.storage.is_arena]
    inputs, outputs = list(old.inputs), list(old.outputs)
    if inputs and rng.random() < 0.7:
        place = rng.randrange(len(inputs))
        inputs[place] = rng.choice([None, rng.choice(everywhere), rng.choice(everywhere)])
        if rng.random() < 0.2:
            inputs = rng.choice([inputs[:place], [*inputs, rng.choice(everywhere)]])
        return replace(old, inputs=tuple(inputs)), f"input {place} is another"
    if not outputs:
        return old, "nothing to change"
    place = rng.randrange(len(outputs))
    outputs[place] = rng.choice([None, rng.choice(in_arena), rng.choice(in_arena)])
    return replace(old, outputs=tuple(outputs)), f"output {place} is {_shown(outputs[place])}"


def _change_attribute(old: Instruction, program: LoweredProgram, rng: random.Random) -> tuple[Instruction, str]:
    if not old.attributes:
        return old, "nothing to change"
    attributes: dict[str, object] = dict(old.attributes)
    name = rng.choice(sorted(attributes))
    value = attributes[name]
    action = rng.choice(["remove", "near", "usual", "usual", "usual", "any"])
    if action == "remove":
        del attributes[name]
    elif action == "near" and isinstance(value, int):
        attributes[name] = value + rng.choice([-1, 1, 2, value])
    else:
        usual = _INTEGERS if isinstance(value, int) else _REALS if isinstance(value, float) else _TEXTS
        lists = [rng.choices(_INTEGERS, k=rng.randrange(4))]
        attributes[name] = rng.choice(usual if action == "usual" else [*_INTEGERS, *_REALS, *_TEXTS, *lists])
    mapping: Mapping[str, object] = attributes
    return replace(old, attributes=mapping), f"{name} = {attributes.get(name)!r}"  # type: ignore[arg-type]


def _change_kind(old: Instruction, program: LoweredProgram, rng: random.Random) -> tuple[Instruction, str]:
    from inferencex.runtime.backends.cpu.native import _cpu

    kind = rng.choice(_cpu.operation_kinds())
    return replace(old, kind=kind), f"became {kind}"


def _shown(view: View | None) -> str:
    if view is None:
        return "nothing"
    return f"{view.dtype} {[str(d) for d in view.dims]} by {[str(s) for s in view.strides]} from {view.offset}"
