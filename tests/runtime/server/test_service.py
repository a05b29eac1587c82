"""Requests from their admission to their end, whatever goes wrong: each is told so, and nothing of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from inferencex.formats.errors import BackendError
from inferencex.runtime import LLM
from inferencex.runtime.params import SamplingParams
from inferencex.runtime.server.access.quotas import Quotas
from inferencex.runtime.server.calls import ANONYMOUS, Call, CallerLimits, Observer, RequestRecord
from inferencex.runtime.server.engine_loop import Arrival
from inferencex.runtime.server.errors import Failed, InvalidRequest, TimedOut, TooManyRequests, Unavailable
from inferencex.runtime.server.filters import FilterContext, Filters
from inferencex.runtime.server.models.loading import LoadedReplicas
from inferencex.runtime.server.models.registry import ModelRegistry
from inferencex.runtime.server.models.served import ServedModel
from inferencex.runtime.server.models.version import LoadRequest
from inferencex.runtime.server.service import InferenceService, ServiceLimits
from inferencex.runtime.structured import Grammar

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
PATIENCE = 30.0  # seconds

Scenario: TypeAlias = Callable[[InferenceService, ServedModel], Awaitable[None]]
Run: TypeAlias = Callable[..., None]


class Records:
    """An observer that remembers, and one that fails where it is told to."""

    def __init__(self, fails: bool = False) -> None:
        self.told: list[tuple[str, RequestRecord]] = []
        self.fails = fails

    def accepted(self, record: RequestRecord) -> None:
        self._note("accepted", record)

    def rejected(self, record: RequestRecord) -> None:
        self._note("rejected", record)

    def finished(self, record: RequestRecord) -> None:
        self._note("finished", record)

    def _note(self, event: str, record: RequestRecord) -> None:
        self.told.append((event, record))
        if self.fails:
            raise OSError("the disk is full")


class Gate:
    """A filter of prompts that lets none through until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def check_input(self, text: str, context: FilterContext) -> str | None:
        self.reached.set()
        await self.opened.wait()
        return None


@pytest.fixture
def run(text_bundle: Path, hash_backend: Any) -> Run:
    """Run a scenario against a model without weights; afterwards nothing may be left over."""

    def run(
        scenario: Scenario,
        limits: ServiceLimits | None = None,
        quotas: Quotas | None = None,
        gate: bool = False,
        observers: Sequence[Observer] = (),
    ) -> None:
        async def scene() -> None:
            llm = LLM(text_bundle, backend=hash_backend, max_num_seqs=8)
            registry = ModelRegistry(loader=lambda path, options, progress: LoadedReplicas([llm], options, None))
            model = await registry.load(LoadRequest("m", text_bundle)).loaded()
            filters = Filters([Gate()]) if gate else None
            service = InferenceService(
                registry, quotas or Quotas(), limits=limits, filters=filters, observers=observers
            )
            await scenario(service, model)
            assert await service.drained(PATIENCE)
            check_idle(service, model)
            await registry.close()

        asyncio.run(scene())

    return run


def call(params: SamplingParams = SHORT, prompt: str = "once upon a time", **others: Any) -> Call:
    return Call("m", prompt, params, "id-1", "chat", **others)


def gate_of(service: InferenceService) -> Gate:
    gate = service.filters._input[0].__self__  # type: ignore[attr-defined]
    assert isinstance(gate, Gate)
    return gate


def check_idle(service: InferenceService, model: ServedModel) -> None:
    engine = model.llm.engine
    engine.check_integrity()
    assert service.num_running == 0 and model.num_leases == 0
    assert [loop.num_unfinished for loop in model.loops] == [0]
    assert not engine.has_unfinished and engine.stats.kv_blocks_used == 0


def test_what_times_out_while_nobody_reads_gives_everything_back_at_once(run: Run, hash_backend: Any) -> None:
    async def scenario(service: InferenceService, model: ServedModel) -> None:
        generation = await service.start(call(LONG, stream=True, timeout=0.05), ANONYMOUS)
        assert await service.drained(PATIENCE)  # though its client takes nothing
        check_idle(service, model)
        with pytest.raises(TimedOut, match=r"longer than the 0\.05 s"):
            await generation.result()
        assert [delta async for delta in generation] == []

    run(scenario)


def test_what_a_shutdown_ends_gives_everything_back_though_nobody_reads(run: Run) -> None:
    records = Records()

    async def scenario(service: InferenceService, model: ServedModel) -> None:
        generation = await service.start(call(LONG, stream=True), ANONYMOUS)
        service.end_all()
        assert await service.drained(PATIENCE)
        check_idle(service, model)
        with pytest.raises(Unavailable, match="shutting down"):
            await generation.result()

    run(scenario, observers=[records])
    [(_, record)] = [told for told in records.told if told[0] == "finished"]
    assert record.status == "aborted" and record.error is not None and record.error.code == "shutting_down"


def test_a_drain_waits_for_requests_whose_prompts_are_being_read(run: Run) -> None:
    async def scenario(service: InferenceService, model: ServedModel) -> None:
        gate = gate_of(service)
        starting = asyncio.create_task(service.start(call(), ANONYMOUS))
        await gate.reached.wait()
        service.begin_drain()
        assert not await service.drained(0.0)
        gate.opened.set()
        generation = await starting
        assert len((await generation.result()).outputs[0].token_ids) == 3

    run(scenario, gate=True)


def test_a_request_whose_prompt_was_read_too_late_is_told_of_the_shutdown(run: Run) -> None:
    async def scenario(service: InferenceService, model: ServedModel) -> None:
        gate = gate_of(service)
        starting = asyncio.create_task(service.start(call(), ANONYMOUS))
        await gate.reached.wait()
        service.begin_drain()
        service.end_all()
        gate.opened.set()
        with pytest.raises(Unavailable, match="shutting down"):
            await starting

    run(scenario, gate=True)


def test_the_time_of_a_request_begins_before_its_prompt_is_read(run: Run) -> None:
    async def scenario(service: InferenceService, model: ServedModel) -> None:
        with pytest.raises(TimedOut, match=r"longer than the 0\.05 s"):
            await service.start(call(timeout=0.05), ANONYMOUS)

    run(scenario, gate=True)


def test_a_client_that_leaves_while_its_prompt_is_read_leaves_nothing(run: Run) -> None:
    async def scenario(service: InferenceService, model: ServedModel) -> None:
        starting = asyncio.create_task(service.start(call(), ANONYMOUS))
        await gate_of(service).reached.wait()
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()

    run(scenario, gate=True)


def test_an_observer_that_fails_harms_no_request(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Records(fails=True), Records()

    async def scenario(service: InferenceService, model: ServedModel) -> None:
        for generation in await service.start_all([call(), call()], ANONYMOUS):
            assert len((await generation.result()).outputs[0].token_ids) == 3
        with pytest.raises(InvalidRequest):
            await service.start(call(SamplingParams(n=100)), ANONYMOUS)

    run(scenario, limits=ServiceLimits(max_n=2), observers=[broken, sound])
    expected = ["accepted", "accepted", "finished", "finished", "rejected"]
    assert sorted(event for event, _ in broken.told) == sorted(event for event, _ in sound.told) == expected
    assert "the disk is full" in caplog.text


def test_who_may_ask_nothing_now_has_no_prompt_read(run: Run) -> None:
    quotas = Quotas(CallerLimits(concurrent=1, requests_per_minute=2), clock=lambda: 0.0)

    async def scenario(service: InferenceService, model: ServedModel) -> None:
        gate = gate_of(service)
        for _ in range(3):  # those that leave do not count
            first = asyncio.create_task(service.start(call(), ANONYMOUS))
            await gate.reached.wait()
            gate.reached.clear()
            with pytest.raises(TooManyRequests, match="1 requests in progress, and may have 1"):
                await service.start(call(), ANONYMOUS)
            assert not gate.reached.is_set()
            first.cancel()
            await asyncio.wait([first])

    run(scenario, quotas=quotas, gate=True)


def test_a_full_queue_has_no_prompt_read(run: Run) -> None:
    async def scenario(service: InferenceService, model: ServedModel) -> None:
        gate = gate_of(service)
        gate.opened.set()
        running = await service.start_all([call(LONG)] * 9, ANONYMOUS)  # eight seats, and one in the queue
        gate.reached.clear()
        with pytest.raises(TooManyRequests, match="its queue is full"):
            await service.start(call(), ANONYMOUS)
        assert not gate.reached.is_set()
        for generation in running:
            generation.close()

    run(scenario, limits=ServiceLimits(max_queue=1), gate=True)


def test_tokens_that_nobody_read_are_paid_for(run: Run) -> None:
    quotas = Quotas(CallerLimits(tokens_per_minute=200), clock=lambda: 0.0)

    async def scenario(service: InferenceService, model: ServedModel) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
        generation = await service.start(call(params), ANONYMOUS)
        while not generation._over:  # the engine is done, and the client leaves before it looks
            await asyncio.sleep(0)
        generation.close()
        with pytest.raises(TooManyRequests, match="may use 200 tokens a minute"):
            await service.start(call(params), ANONYMOUS)

    run(scenario, quotas=quotas)


def test_a_grammar_that_cannot_be_followed_is_the_request_s_fault(run: Run) -> None:
    pytest.importorskip("llguidance", reason="needs the extra inferencex[serve]")
    many = Grammar.choice([f"choice number {number * 7919}" for number in range(3000)])

    async def scenario(service: InferenceService, model: ServedModel) -> None:
        generation = await service.start(call(grammar=many), ANONYMOUS)
        with pytest.raises(InvalidRequest, match="the grammar cannot be followed any further"):
            await generation.result()

    run(scenario)


def test_what_the_server_lacks_is_not_the_request_s_fault(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(service: InferenceService, model: ServedModel) -> None:
        def compile(grammar: Grammar) -> Any:
            raise BackendError("structured output needs the package llguidance")

        monkeypatch.setattr(model.llm.grammars, "compile", compile)
        with pytest.raises(Failed, match="needs the package llguidance"):
            await service.start(call(grammar=Grammar.json_object()), ANONYMOUS)

    run(scenario)


def test_others_are_served_while_many_prompts_are_read(run: Run) -> None:
    async def scenario(service: InferenceService, model: ServedModel) -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        generations = await service.start_all([call() for _ in range(20)], ANONYMOUS)
        assert turns >= 19
        task.cancel()
        for generation in generations:
            generation.close()

    run(scenario)


def test_answers_to_all_prompts_together_are_limited(run: Run) -> None:
    async def scenario(service: InferenceService, model: ServedModel) -> None:
        params = SamplingParams(n=4, max_tokens=1, temperature=1.0)
        with pytest.raises(InvalidRequest, match=r"12 answers to 3 prompts in one request; .* at most 8 together"):
            await service.start_all([call(params)] * 3, ANONYMOUS)
        for generation in await service.start_all([call(params)] * 2, ANONYMOUS):
            assert len((await generation.result()).outputs) == 4

    run(scenario, limits=ServiceLimits(max_n=4, max_prompts=8))


def test_a_request_that_is_aborted_as_its_step_fails_is_not_counted_for_ever(run: Run, hash_backend: Any) -> None:
    async def scenario(service: InferenceService, model: ServedModel) -> None:
        generation = await service.start(call(LONG, stream=True), ANONYMOUS)
        [loop] = model.loops
        aborted: list[Any] = []

        def fail(batch: Any) -> None:
            hash_backend.model.before_step = None
            # Its client leaves during the step, so that the abort is what the engine's thread does next.
            loop.abort(generation._request.id, aborted.append)
            raise BackendError("the device is on fire")

        hash_backend.model.before_step = fail
        while not aborted:
            await asyncio.sleep(0)
        assert aborted == [None] and loop.num_unfinished == 0
        generation.close()

    run(scenario)


def test_an_engine_that_cannot_take_a_request_serves_the_next(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(service: InferenceService, model: ServedModel) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(model.llm.engine, "submit", lambda request: {}["no such queue"])
            generation = await service.start(call(), ANONYMOUS)
            with pytest.raises(Failed, match="KeyError: 'no such queue'"):
                await generation.result()
        generation = await service.start(call(), ANONYMOUS)
        assert len((await generation.result()).outputs[0].token_ids) == 3

    run(scenario)


def test_nobody_waits_for_an_engine_whose_thread_has_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(service: InferenceService, model: ServedModel) -> None:
        [loop] = model.loops
        obey, failures = loop._obey, [KeyError("nothing")]

        def fail_once() -> None:
            if failures:
                raise failures.pop()
            obey()

        monkeypatch.setattr(loop, "_obey", fail_once)
        generation = await service.start(call(), ANONYMOUS)
        with pytest.raises(Failed, match="has failed: KeyError"):
            await generation.result()
        with pytest.raises(Failed, match="has failed: KeyError"):
            await (await service.start(call(), ANONYMOUS)).result()

    run(scenario)


def test_a_result_that_cannot_be_delivered_holds_up_no_other(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(service: InferenceService, model: ServedModel) -> None:
        [loop] = model.loops
        heard: list[Arrival] = []

        def refuse(arrival: Arrival) -> None:
            raise OSError("nobody is here")

        def request(name: str) -> Any:
            return model.llm.engine.prepare(name, [5, 6, 7], SHORT)

        loop.submit(request("first"), refuse, every_step=False)
        loop.submit(request("second"), heard.append, every_step=False)
        while not heard:
            await asyncio.sleep(0)

    run(scenario)
    assert "nobody is here" in caplog.text
