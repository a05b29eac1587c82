"""Refining whole models: better or the same on what is held out, the same format, the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from inferencex.convert.quantize import TensorScheme
from inferencex.convert.quantize.refine import (
    Progress,
    Rates,
    Refinable,
    Refined,
    Schedule,
    Windows,
    end_to_end_bytes,
    refine_end_to_end,
)
from inferencex.convert.quantize.refine.distillation import divergence
from inferencex.formats.errors import OptionError, QuantizationError
from tests.convert.quantize.refine.tiny_model import TinyModel

SCHEDULE = Schedule(steps=60, check_every=10, rates=Rates(2e-2, 2e-3, 2e-2, 2e-3))


def _refine(model: TinyModel, schedule: Schedule = SCHEDULE, **options: object) -> Refined:
    return refine_end_to_end(
        model,
        model.refinable(),
        model.windows(24, seed=1),
        model.windows(8, seed=2),
        schedule,
        **{"threads": 1, **options},  # type: ignore[arg-type]
    )


def _assert_same(a: Refined, b: Refined) -> None:
    for name, tensor in a.result.weights.items():
        other = b.result.weights[name]
        for key in ("values", "scales", "zero_points"):
            assert np.array_equal(getattr(tensor, key), getattr(other, key)), (name, key)
    for name, plain in a.result.plain.items():
        assert torch.equal(plain, b.result.plain[name])
    assert np.array_equal(
        [list(vars(p).values()) for p in a.history], [list(vars(p).values()) for p in b.history], True
    )


@pytest.mark.parametrize(
    "scheme", [TensorScheme("int4", 16, symmetric=False), TensorScheme("int4", 32, symmetric=True)], ids=str
)
def test_lowers_the_divergence_held_out_and_keeps_the_format(scheme: TensorScheme) -> None:
    model = TinyModel(scheme=scheme)
    refined = _refine(model)
    assert refined.after < 0.8 * refined.before
    assert refined.best_step > 0
    for name, before in model.refinable().weights.items():
        after = refined.result.weights[name]
        assert (after.bits, after.group_size, after.symmetric, after.shape, after.scales.dtype) == (
            before.bits,
            before.group_size,
            before.symmetric,
            before.shape,
            before.scales.dtype,
        )
        assert after.nbytes == before.nbytes
    assert {name: p.dtype for name, p in refined.result.plain.items()} == {n: p.dtype for n, p in model.plain.items()}


def test_the_result_is_what_was_judged() -> None:
    model, held_out = TinyModel(), TinyModel().windows(8, seed=2)
    refined = _refine(model)
    again = refine_end_to_end(
        model,
        Refinable(refined.result.weights, {}, refined.result.plain),
        held_out,
        held_out,
        replace(SCHEDULE, steps=0),
        threads=1,
    )
    assert again.before == refined.after


def test_is_never_worse_when_every_step_is_bad() -> None:
    model = TinyModel()
    refined = _refine(model, replace(SCHEDULE, rates=Rates(20.0, 5.0, 20.0, 5.0), patience=3))
    assert refined.best_step == 0
    assert refined.after == refined.before
    assert refined.steps == 30
    for name, before in model.refinable().weights.items():
        assert np.array_equal(refined.result.weights[name].values, before.values)
        assert np.array_equal(refined.result.weights[name].scales, before.scales)
    assert all(torch.equal(refined.result.plain[name], plain) for name, plain in model.plain.items())


def test_the_number_of_threads_does_not_matter() -> None:
    schedule = replace(SCHEDULE, samples_per_step=4, steps=20)
    _assert_same(_refine(TinyModel(), schedule, threads=1), _refine(TinyModel(), schedule, threads=3))


def test_goes_on_after_an_interruption(tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.step == 40:
            raise Interrupted

    path = tmp_path / "state"
    with pytest.raises(Interrupted):
        _refine(TinyModel(), observe=stop, state_file=path)
    seen: list[Progress] = []
    resumed = _refine(TinyModel(), observe=seen.append, state_file=path)
    assert seen[0].step > 20
    _assert_same(resumed, _refine(TinyModel()))
    with pytest.raises(OptionError, match="another refinement"):
        _refine(TinyModel(), replace(SCHEDULE, seed=1), state_file=path)


def test_plain_tensors_alone_can_be_learned() -> None:
    model = TinyModel()
    refined = _refine(model, replace(SCHEDULE, rates=Rates(0.0, 0.0, 0.0, 5e-3)))
    assert refined.after < refined.before
    for name, before in model.refinable().weights.items():
        assert np.array_equal(refined.result.weights[name].values, before.values)


def test_the_gradient_of_the_divergence_is_that_of_its_value() -> None:
    model = TinyModel()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(70, 40, generator=generator).requires_grad_()
    target = torch.randn(70, 40, generator=generator)
    wanted = torch.log_softmax(model.logits(target).double(), -1)
    value = (wanted.exp() * (wanted - torch.log_softmax(model.logits(hidden).double(), -1))).sum()
    (gradient,) = torch.autograd.grad(value, hidden)
    found = divergence(model.logits, hidden.detach(), target, gradient=True)
    assert found.total == pytest.approx(value.item(), rel=1e-5)
    assert found.gradient is not None
    torch.testing.assert_close(found.gradient, gradient, rtol=1e-4, atol=1e-5)


def test_every_sample_is_used_before_one_is_used_again() -> None:
    schedule = Schedule(steps=10, samples_per_step=3)
    drawn = [sample for step in range(10) for sample in schedule.samples(step, 6)]
    assert all(sorted(drawn[at : at + 6]) == list(range(6)) for at in range(0, 30, 6))
    assert drawn[:6] != drawn[6:12]


def test_windows_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(QuantizationError, match=r"token ids \[2, 5\].*targets \[2, 4, 3\]"):
        Windows(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 4, 3))


def test_memory_is_known_beforehand() -> None:
    refinable = TinyModel().refinable()
    weights = sum(int(np.prod(tensor.shape)) for tensor in refinable.weights.values())
    assert 18 * weights < end_to_end_bytes(refinable, 2) < 26 * weights


def test_at_least_one_sample_of_each_kind_is_needed() -> None:
    model = TinyModel()
    none = Windows(torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, 4, 40))
    with pytest.raises(QuantizationError, match="0 samples to learn from and 3 to judge by"):
        refine_end_to_end(model, model.refinable(), none, model.windows(3, seed=1), SCHEDULE)


def test_a_model_that_overflows_is_refused() -> None:
    model = TinyModel()
    model.head = model.head * float("inf")
    with pytest.raises(QuantizationError, match="held out is nan before anything is refined"):
        _refine(model)
