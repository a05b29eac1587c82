"""Running a lowered graph, one instruction after the other."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.backends.triton import TritonBackend
from inferencex.runtime.backends.triton.lowering.program import Program
from inferencex.runtime.backends.triton.step_inputs import StepInputs
from inferencex.runtime.backends.triton.step_plan import StepBuffer, plan_step
from tests.runtime.backends.triton.test_executable import prompts_batch, step_batch


def changed_by(program: Program, values: dict[str, Tensor], step: StepInputs) -> list[str]:
    """Run a step, and return which instructions changed a value that they did not compute."""
    found = []
    for instruction in program.instructions:
        before = {name: value.clone() for name, value in values.items()}
        results = instruction.run(values, step)
        found += [
            f"{instruction.operator} changed {name}"
            for name, old in before.items()
            if not torch.equal(old, values[name])
        ]
        values.update({n: r for n, r in zip(instruction.writes, results, strict=False) if n and r is not None})
    return found


def test_no_instruction_changes_what_another_has_computed(tiny_bundle: Path) -> None:
    """Others may read it, or what it is a view of: one row of a part of some rows is not apart from the others."""
    executable = TritonBackend().compile(tiny_bundle, BackendOptions(num_blocks=24, block_size=4))
    for batch in (prompts_batch(), step_batch([(5, 6), (1, 2)], [1, 2]), step_batch([(5, 6)], [1])):
        plan = plan_step(batch, 4, tile_rows=16)
        inputs = StepBuffer(plan.shape, torch.device("cpu"), tile_rows=16).load(plan)
        names = ("token_ids", "positions", "prompt_lengths", "logit_rows")
        values = {name: getattr(inputs, name).clone() for name in names}
        with torch.inference_mode():
            assert changed_by(executable.program, values, inputs) == []
