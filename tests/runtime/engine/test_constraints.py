"""Constrained sequences: only what is allowed, from what the model likes best, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencex.formats.errors import BackendError, RequestError
from inferencex.runtime.engine.constraint import TokenMasks, allowed_tokens, fill_masks, mask_width
from inferencex.runtime.engine.engine import Engine
from inferencex.runtime.engine.native import _sampler
from inferencex.runtime.engine.sampler import NOTHING_ALLOWED, SequenceSampler, choose_tokens
from inferencex.runtime.engine.scheduler import SchedulerOptions
from inferencex.runtime.outputs import CompletionDelta, RequestOutput
from inferencex.runtime.params import SamplingParams
from tests.runtime.engine.constraints import Script, bits

VOCAB = 50
END = 49
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, seed=3)


def run(engine: Engine) -> tuple[dict[str, RequestOutput], list[CompletionDelta]]:
    outputs, deltas = {}, []
    while engine.has_unfinished:
        for delta in engine.step():
            deltas.append(delta)
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        engine.check_integrity()
    assert engine.stats.kv_blocks_used == 0
    return outputs, deltas


class Factory:
    """Makes scripts, and keeps them."""

    def __init__(self, allowed: Sequence[Iterable[int]], **options: Any) -> None:
        self.allowed, self.options = allowed, options
        self.made: list[Script] = []

    def __call__(self) -> Script:
        self.made.append(Script(self.allowed, VOCAB, **self.options))
        return self.made[-1]


def answer(model: Any, factory: Factory, params: SamplingParams = GREEDY, **options: Any) -> Any:
    engine = Engine(model, eos_token_ids=[END], **options)
    engine.add_request("x", [1, 2, 3], params, constraint=factory)
    return run(engine)[0]["x"].outputs[0]


def constrained_greedy(model: Any, prompt: Sequence[int], allowed: Sequence[Iterable[int]]) -> list[int]:
    """What the model likes best of what is allowed, computed without the engine."""
    rows: list[int] = []
    for tokens in allowed:
        model.transform = lambda context, logits, tokens=tokens: np.where(
            np.isin(np.arange(VOCAB), list(tokens)), logits, -np.inf
        )
        rows += model.greedy([*prompt, *rows], 1)
    model.transform = None
    return rows


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SamplingParams(temperature=0.8, top_p=0.9, top_k=5, max_tokens=9)])
def test_only_allowed_tokens_are_chosen_and_the_end_comes_by_itself(hash_model: Any, params: SamplingParams) -> None:
    factory = Factory([{1, 2, 3}, {40}, range(10, 20), {31, 32, 33}])
    output = answer(hash_model(), factory, params)
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert len(output.token_ids) == 4
    assert all(token in allowed for token, allowed in zip(output.token_ids, factory.allowed, strict=True))
    assert factory.made[0].accepted == list(output.token_ids)
    assert factory.made[0].num_masks == 4


def test_the_best_of_what_is_allowed_is_taken(hash_model: Any) -> None:
    allowed = [range(0, 49, 7), range(1, 49, 7), {4, 31, 32}]
    output = answer(hash_model(), Factory(allowed))
    assert list(output.token_ids) == constrained_greedy(hash_model(), [1, 2, 3], allowed)


def test_log_probabilities_stay_the_models_own(hash_model: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2)
    output = answer(hash_model(), Factory([{7}, {8}, {9}]), params)
    assert list(output.token_ids) == [7, 8, 9]
    for position, token in enumerate((7, 8, 9)):
        from tests.runtime.conftest import hash_logits

        logits = hash_logits([1, 2, 3, 7, 8, 9][: 3 + position], VOCAB).astype(np.float64)
        expected = logits[token] - np.log(np.exp(logits).sum())
        entry = output.logprobs[position][token]
        assert entry.logprob == pytest.approx(expected, abs=1e-5)
        assert entry.rank == 1 + int((logits > logits[token]).sum())


@pytest.mark.parametrize("factory", [Factory([{1}, {2, END}, {3}, {4}], stops=[2]), Factory([(), (), ()], stops=[])])
def test_the_end_of_sequence_is_allowed_exactly_where_the_output_may_stop(hash_model: Any, factory: Factory) -> None:
    """Even a constraint whose masks have the token does not let it through before."""
    model = hash_model()
    model.transform = lambda context, logits: np.where(np.arange(VOCAB) == END, np.float32(9), logits)
    output = answer(model, factory)
    assert output.finish_reason == "stop"
    expected_length = 3  # [1, 2, END], or three tokens of anything
    assert len(output.token_ids) == expected_length
    assert (output.token_ids[-1] == END) == bool(factory.options["stops"])
    assert END not in factory.made[0].accepted


def test_stop_tokens_of_the_request_end_it_where_it_may_stop(hash_model: Any) -> None:
    model = hash_model()
    model.transform = lambda context, logits: np.where(np.arange(VOCAB) == 30, np.float32(9), logits)
    params = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=[30])
    output = answer(model, Factory([{1}, {2}, {3}, {4}], stops=[3]), params)
    assert (list(output.token_ids), output.stop_reason) == ([1, 2, 3, 30], 30)
    # A stop token that the grammar allows as a part of the text ends it, too: that is what it was asked for.
    output = answer(model, Factory([{1}, {2, 30}, {3}]), params)
    assert (list(output.token_ids), output.stop_reason) == ([1, 30], 30)


def test_ignored_ends_are_never_chosen(hash_model: Any) -> None:
    model = hash_model()
    model.transform = lambda context, logits: np.where(np.arange(VOCAB) == END, np.float32(9), logits)
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    factory = Factory([{1, END}, {2}], stops=[0, 1], loops=True)
    output = answer(model, factory, params)
    assert (list(output.token_ids), output.finish_reason) == ([1, 2, 1, 2, 1, 2, 1], "length")


def test_a_minimum_length_gives_way_where_only_the_end_is_allowed(hash_model: Any) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=6, max_tokens=9)
    # Complete after two tokens: it ends, whatever the minimum says.
    assert list(answer(hash_model(), Factory([{1}, {2}]), params).token_ids) == [1, 2]
    # May stop after two, may go on: it goes on to the minimum, and then as it likes.
    model = hash_model()
    model.transform = lambda context, logits: np.where(np.arange(VOCAB) == END, np.float32(9), logits)
    factory = Factory([{1}, {2}], stops=[0], loops=True)
    assert list(answer(model, factory, params).token_ids) == [1, 2, 1, 2, 1, 2, END]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_the_end_is_allowed_and_it_is_too_early(hash_model: Any, temperature: float) -> None:
    class Open(Script):
        """Does not know yet that it has ended."""

        @property
        def finished(self) -> bool:
            return False

        def fill_mask(self, mask: Any) -> bool:
            if self._place < len(self.allowed):
                return super().fill_mask(mask)
            mask[:] = 0
            return True

        @property
        def may_stop(self) -> bool:
            return self._place == len(self.allowed)

    params = SamplingParams(temperature=temperature, min_tokens=6, max_tokens=9, ignore_eos=False)
    engine = Engine(hash_model(), eos_token_ids=[END])
    engine.add_request("x", [1, 2, 3], params, constraint=lambda: Open([{5}, {6}], VOCAB))
    output = run(engine)[0]["x"].outputs[0]
    assert (list(output.token_ids), output.finish_reason) == ([5, 6, END], "stop")
    # Without a token that ends it, it ends without one; its siblings are served all the same.
    params = SamplingParams(temperature=1.0, n=2, seed=1, max_tokens=9, ignore_eos=True)
    engine.add_request("y", [1, 2, 3], params, constraint=lambda: Open([{5}, {6}], VOCAB))
    outputs, deltas = run(engine)
    assert [list(o.token_ids) for o in outputs["y"].outputs] == [[5, 6], [5, 6]]
    assert {o.finish_reason for o in outputs["y"].outputs} == {"stop"}
    assert [delta.token_ids for delta in deltas if delta.finish_reason] == [(), ()]


def test_each_continuation_has_its_own(hash_model: Any) -> None:
    factory = Factory([range(10), range(10, 20), range(20, 30), range(30, 40)])
    engine = Engine(hash_model(), eos_token_ids=[END])
    engine.add_request("x", [1, 2, 3], SamplingParams(temperature=1.0, n=4, seed=5, max_tokens=9), constraint=factory)
    outputs = run(engine)[0]["x"].outputs
    assert len({output.token_ids for output in outputs}) > 1
    assert [made.accepted for made in factory.made] == [list(output.token_ids) for output in outputs]


def test_mixed_batches_and_preemption_change_nothing(hash_model: Any) -> None:
    """A pool so small that sequences are preempted: nothing is told twice, and others choose as they would alone."""
    allowed = [range(index % 7, VOCAB - 1, 3) for index in range(12)]
    params = SamplingParams(temperature=0.9, max_tokens=12, seed=11)
    free = SamplingParams(temperature=0.9, max_tokens=12, seed=12, ignore_eos=True)

    def serve(num_blocks: int) -> tuple[dict[str, RequestOutput], list[Factory], int]:
        engine = Engine(
            hash_model(num_blocks=num_blocks),
            SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=9),
            eos_token_ids=[END],
        )
        factories = []
        for index in range(4):
            factories.append(Factory(allowed))
            engine.add_request(f"c{index}", [index, 2, 3, 4, 5], params, constraint=factories[-1])
            engine.add_request(f"f{index}", [index, 9, 8], free)
        return run(engine)[0], factories, engine.stats.num_preemptions

    plenty, _, none = serve(64)
    tight, factories, some = serve(8)
    assert none == 0 < some
    for name, output in plenty.items():
        assert tight[name].outputs[0].token_ids == output.outputs[0].token_ids
        assert output.outputs[0].finish_reason == ("stop" if name[0] == "c" else "length")
    for index, factory in enumerate(factories):
        [script] = factory.made
        assert script.accepted == list(tight[f"c{index}"].outputs[0].token_ids)
        assert script.num_masks == 12


class Failing(Script):
    """Fails in one of its methods after two tokens."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__([(), (), (), (), ()], VOCAB)
        self.where, self.error = where, error

    def _maybe(self, where: str) -> None:
        if where == self.where and len(self.accepted) == 2:
            raise self.error

    @property
    def may_stop(self) -> bool:
        self._maybe("may_stop")
        return super().may_stop

    @property
    def finished(self) -> bool:
        self._maybe("finished")
        return super().finished

    def fill_mask(self, mask: Any) -> bool:
        self._maybe("fill_mask")
        return super().fill_mask(mask)

    def accept(self, token_id: int) -> None:
        self._maybe("accept")
        super().accept(token_id)


@pytest.mark.parametrize("where", ["may_stop", "finished", "fill_mask", "accept"])
def test_a_constraint_that_fails_ends_its_request_alone(hash_model: Any, where: str) -> None:
    model = hash_model()
    engine = Engine(model, eos_token_ids=[END])
    engine.add_request("bad", [4, 5], GREEDY, constraint=lambda: Failing(where, ZeroDivisionError("oh")))
    engine.add_request("words", [4, 5], GREEDY, constraint=lambda: Failing(where, RequestError("my own words")))
    engine.add_request("good", [7, 8], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    outputs, _ = run(engine)
    assert list(outputs["good"].outputs[0].token_ids) == model.greedy([7, 8], 12)
    for name in ("bad", "words"):
        assert outputs[name].outputs[0].finish_reason == "error"
        assert len(outputs[name].outputs[0].token_ids) == (1 if where == "finished" else 2)
    error = outputs["bad"].error
    assert isinstance(error, BackendError)
    assert str(error) == "request bad: its constraint failed after 2 tokens: ZeroDivisionError: oh"
    assert str(outputs["words"].error) == "my own words"


def test_an_empty_mask_is_an_error_of_the_request(hash_model: Any) -> None:
    class Nothing(Script):
        def fill_mask(self, mask: Any) -> bool:
            super().fill_mask(mask)
            mask[:] = 0
            return True

    engine = Engine(hash_model(), eos_token_ids=[END])
    engine.add_request("x", [4, 5], GREEDY, constraint=lambda: Nothing([{1}], VOCAB))
    engine.add_request("y", [4, 5], SamplingParams(temperature=0.0, max_tokens=3))
    outputs, _ = run(engine)
    assert isinstance(outputs["x"].error, RequestError)
    assert "request x: after 0 tokens the constraint allows no token of the vocabulary" in str(outputs["x"].error)
    assert outputs["y"].error is None


def test_what_is_no_constraint_is_refused(hash_model: Any) -> None:
    engine = Engine(hash_model(), eos_token_ids=[END])
    with pytest.raises(RequestError, match="expected a function that makes one"):
        engine.add_request("x", [1], GREEDY, constraint=Script([{1}], VOCAB))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="no output but the empty text"):
        engine.add_request("x", [1], GREEDY, constraint=lambda: Script([], VOCAB))
    assert not engine.has_unfinished


def test_abort_and_count(hash_model: Any) -> None:
    """The engine stops looking for constraints when there are none any more."""
    engine = Engine(hash_model(), eos_token_ids=[END])
    engine.add_request("x", [1], GREEDY, constraint=Factory([()] * 20))
    engine.step()
    assert engine._num_constrained == 1
    engine.abort("x")
    assert engine._num_constrained == 0


@pytest.mark.parametrize("size", [1, 31, 32, 33, 50, 257, 4097])
def test_masks_say_what_bits_say(size: int) -> None:
    wanted = sorted({0, size // 3, size - 1})
    mask = bits(wanted, size)
    assert mask.shape == (mask_width(size),)
    assert np.flatnonzero(allowed_tokens(mask, size)).tolist() == wanted
    full = np.full(mask_width(size), -1, dtype=np.int32)
    assert allowed_tokens(full, size).sum() == size
    assert fill_masks([None, None], size) is None


@settings(max_examples=200, deadline=None)
@given(data=st.data(), size=st.sampled_from([1, 5, 31, 32, 64, 255, 257, 700, 4097]), seed=st.integers(0, 10**6))
def test_native_choices_under_a_mask_are_those_of_the_definition(data: st.DataObject, size: int, seed: int) -> None:
    from tests.runtime.engine.test_choose_tokens import parameters, random_logits

    random = np.random.default_rng(seed)
    count = data.draw(st.integers(1, 4))
    drawn = [data.draw(parameters(size)) for _ in range(count)]
    native = [SequenceSampler(params, i, (0,), stop) for i, (params, stop) in enumerate(drawn)]
    defined = [SequenceSampler(params, i, (0,), stop) for i, (params, stop) in enumerate(drawn)]
    kinds = st.sampled_from(["normal", "ties", "flat", "peaked", "extreme"])
    for step in range(3):
        logits = np.stack([random_logits(seed + 7 * step + row, size, data.draw(kinds)) for row in range(count)])
        rows, words = [], []
        for _ in range(count):
            share = data.draw(st.sampled_from([None, 0.0, 0.01, 0.5, 0.99, 1.0]))
            if share is None:
                rows.append(-1)
                continue
            allowed = np.flatnonzero(random.random(size) < share)
            if share == 0.01 and not len(allowed):
                allowed = np.array([random.integers(size)])
            mask = bits(allowed.tolist(), size).view(np.uint32)
            if size % 32:  # what lies past the vocabulary means nothing
                mask[-1] |= np.uint32((0xFFFFFFFF << (size % 32)) & 0xFFFFFFFF)
            rows.append(len(words))
            words.append(mask.view(np.int32))
        stacked = np.stack(words) if words else np.empty((0, mask_width(size)), np.int32)
        masks = TokenMasks(stacked, rows)
        before = logits.copy()
        tokens = choose_tokens(logits, range(count), native, masks)
        expected = [sampler.choose(logits[i], mask=masks.of(i)) for i, sampler in enumerate(defined)]
        assert tokens == expected
        assert np.array_equal(logits, before)
        for place, token in enumerate(expected):
            mask = masks.of(place)
            if mask is not None:
                allowed = allowed_tokens(mask, size)
                assert allowed[token] if allowed.any() else token == NOTHING_ALLOWED
            if token >= 0:
                native[place].record(token)
                defined[place].record(token)


def test_masks_of_other_shapes_are_refused() -> None:
    logits = np.zeros((1, 40), dtype=np.float32)
    choose: Callable[..., list[int]] = _sampler.choose
    good = np.full((1, 2), -1, dtype=np.int32)
    assert choose(logits, [0], [None], [0.0], good, [0]) == [0]
    assert choose(logits, [0], [None], [0.0], np.zeros((1, 2), np.int32), [0]) == [NOTHING_ALLOWED]
    with pytest.raises(ValueError, match="with a bit for each token"):
        choose(logits, [0], [None], [0.0], good[:, :1], [0])
    with pytest.raises(ValueError, match="for each row"):
        choose(logits, [0], [None], [0.0], good, [0, 0])
    for row in (1, -2):
        with pytest.raises(IndexError, match="no such mask"):
            choose(logits, [0], [None], [0.0], good, [row])
