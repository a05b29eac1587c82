"""Generate and GenerateStream: what they answer is what the engine answers."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.server.grpc.v1 import inference_pb2 as pb
from tests.runtime.server.grpc.calling import Scene, call, endless, failure, generate

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = ["once upon", "Größe, naïve", "東京", "1234567890 and more of it"]


async def collect(stream: Any) -> tuple[pb.StreamStarted, list[pb.GenerateDelta], pb.StreamFinished]:
    events = [event async for event in stream]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"]
    return events[0].started, [event.delta for event in events[1:-1]], events[-1].finished


def test_greedy_answers_are_the_engine_s_whole_and_streamed(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, GREEDY)

    async def scenario(scene: Scene) -> None:
        asked = [generate(prompt, max_tokens=24, ignore_eos=True) for prompt in PROMPTS]
        answers = await asyncio.gather(*(scene.stub.Generate(request) for request in asked))
        streams = await asyncio.gather(*(collect(scene.stub.GenerateStream(request)) for request in asked))
        for answer, (started, deltas, finished), output in zip(answers, streams, expected, strict=True):
            [choice], [wanted] = answer.choices, output.outputs
            assert choice.text == wanted.text == "".join(delta.text for delta in deltas)
            assert tuple(choice.token_ids) == wanted.token_ids
            assert tuple(token for delta in deltas for token in delta.token_ids) == wanted.token_ids
            assert choice.finish_reason == pb.FINISH_REASON_LENGTH == deltas[-1].finish_reason
            assert [delta.finish_reason for delta in deltas[:-1]] == [0] * (len(deltas) - 1)
            assert answer.model == started.model == "tiny" and answer.id != started.id
            assert started.prompt_tokens == len(output.prompt_token_ids) == answer.usage.prompt_tokens
            assert answer.usage.completion_tokens == 24 == finished.usage.completion_tokens

    call(llm, scenario)


def test_seeded_continuations_are_the_engine_s(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=0.9, seed=7, max_tokens=12, top_p=0.9, logit_bias={40: 2.5})
    [expected] = llm.generate("once", params)

    async def scenario(scene: Scene) -> None:
        request = generate("once", n=3, temperature=0.9, seed=7, max_tokens=12, top_p=0.9, logit_bias={40: 2.5})
        answer = await scene.stub.Generate(request)
        _, deltas, finished = await collect(scene.stub.GenerateStream(request))
        assert [choice.text for choice in answer.choices] == [output.text for output in expected.outputs]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        for output in expected.outputs:
            own = [delta for delta in deltas if delta.index == output.index]
            assert "".join(delta.text for delta in own) == output.text
        assert finished.usage.completion_tokens == sum(len(output.token_ids) for output in expected.outputs)

    call(llm, scenario)


def test_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=0)
    [expected] = llm.generate("once upon", params)

    async def scenario(scene: Scene) -> None:
        request = generate(max_tokens=6, logprobs=3, prompt_logprobs=0)
        answer = await scene.stub.Generate(request)
        _, deltas, finished = await collect(scene.stub.GenerateStream(request))
        [choice], [output] = answer.choices, expected.outputs
        assert output.logprobs is not None and expected.prompt_logprobs is not None
        for position, token_id, wanted in zip(choice.logprobs, output.token_ids, output.logprobs, strict=True):
            assert position.chosen.token_id == token_id
            assert position.chosen.logprob == wanted[token_id].logprob
            assert [entry.rank for entry in position.top] == [1, 2, 3]
            assert all(entry.logprob == wanted[entry.token_id].logprob for entry in position.top)
        assert [position for delta in deltas for position in delta.logprobs] == list(choice.logprobs)
        assert len(answer.prompt_logprobs) == len(expected.prompt_token_ids)
        assert not answer.prompt_logprobs[0].HasField("chosen")
        assert [position.chosen.token_id for position in answer.prompt_logprobs[1:]] == list(
            expected.prompt_token_ids[1:]
        )
        assert not any(position.top for position in answer.prompt_logprobs)
        assert finished.prompt_logprobs == answer.prompt_logprobs

    call(llm, scenario)


def test_token_ids_the_prefix_cache_and_what_ends_an_answer(llm: LLM) -> None:
    ids = list(range(3, 60))
    [expected] = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    stop_id = expected.outputs[0].token_ids[3]
    first = expected.outputs[0].token_ids.index(stop_id)

    async def scenario(scene: Scene) -> None:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=generate(ignore_eos=True).sampling)
        answer = await scene.stub.Generate(request)
        assert tuple(answer.choices[0].token_ids) == expected.outputs[0].token_ids
        assert answer.usage.cached_tokens > 0
        request.sampling.stop_token_ids.append(stop_id)
        [choice] = (await scene.stub.Generate(request)).choices
        assert (choice.finish_reason, choice.stop_token_id) == (pb.FINISH_REASON_STOP, stop_id)
        assert len(choice.token_ids) == first + 1

    call(llm, scenario)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_that_is_cancelled_frees_its_blocks(llm: LLM, streamed: bool) -> None:
    async def scenario(scene: Scene) -> None:
        running: Any
        if streamed:
            running = scene.stub.GenerateStream(endless())
            for _ in range(3):
                await running.read()
        else:
            running = scene.stub.Generate(endless())
            while not llm.engine.scheduler.num_running:
                await asyncio.sleep(0)
        assert scene.service.num_running == 1
        running.cancel()
        assert await scene.service.drained(30)
        assert llm.stats.kv_blocks_used == 0
        assert (await scene.stub.Generate(generate())).choices

    aborted = llm.stats.num_aborted_requests
    call(llm, scenario)
    assert llm.stats.num_aborted_requests == aborted + 1


def test_a_deadline_ends_the_generation(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        error = await failure(scene.stub.Generate(endless(), timeout=0.01))  # the tiny model takes 30 ms
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert await scene.service.drained(30)

    call(llm, scenario)
    assert llm.stats.kv_blocks_used == 0


def test_a_client_that_vanishes_is_noticed(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        stream = scene.stub.GenerateStream(endless())
        await stream.read()
        await scene.channel.close(0)
        assert await scene.service.drained(30)

    call(llm, scenario)
