"""What surrounds a call: keys, request ids, statuses with their details, sizes, and the list of models."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from inferencex.runtime import LLM
from inferencex.runtime.server.config.keys_setting import ApiKey, key_store
from inferencex.runtime.server.grpc.servicer import InferenceServicer
from inferencex.runtime.server.grpc.v1 import inference_pb2 as pb
from inferencex.runtime.server.service import ServiceLimits
from tests.runtime.server.grpc.calling import NO_KEYS, Scene, call, chat, endless, failure, generate, metadata, read_all
from tests.runtime.server.serving import LONG, serving

KEYS = key_store((ApiKey(key="a-user-key", name="ann"),), ())  # type: ignore[arg-type]
BEARER = (("authorization", "Bearer a-user-key"),)


@pytest.mark.parametrize(
    "headers", [None, (("authorization", "Bearer a-wrong-key"),), (("authorization", "a-user-key"),)]
)
def test_without_the_key_nothing_is_answered(llm: LLM, headers: tuple[tuple[str, str], ...] | None) -> None:
    async def scenario(scene: Scene) -> None:
        calls = [
            scene.stub.Generate(generate(), metadata=headers),
            scene.stub.GenerateStream(generate(), metadata=headers).read(),
            scene.stub.Chat(pb.ChatRequest(), metadata=headers),
            scene.stub.ChatStream(pb.ChatRequest(), metadata=headers).read(),
            scene.stub.ListModels(pb.ListModelsRequest(), metadata=headers),
        ]
        for one in calls:
            error = await failure(one)
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
            assert metadata(error)["inferencex-error-code"] == "invalid_api_key"
            assert "a-wrong-key" not in (error.details() or "")

    call(llm, scenario, KEYS)


def test_with_the_key_everything_is(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        assert (await scene.stub.Generate(generate(), metadata=BEARER)).choices
        assert (await scene.stub.ListModels(pb.ListModelsRequest(), metadata=BEARER)).models

    call(llm, scenario, KEYS)


def test_request_ids_go_in_and_out(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        running = scene.stub.Generate(generate(), metadata=(("x-request-id", "mine-1"),))
        assert dict(await running.initial_metadata())["x-request-id"] == "mine-1"
        assert (await running).id == "mine-1"
        for given in ("", "x" * 129, "two words", "a;b"):
            running = scene.stub.Generate(generate(), metadata=(("x-request-id", given),))
            own = dict(await running.initial_metadata())["x-request-id"]
            assert own != given and own.startswith("req-") and (await running).id == own
        failing = scene.stub.Generate(pb.GenerateRequest(), metadata=(("x-request-id", "mine-2"),))
        assert dict(await failing.initial_metadata())["x-request-id"] == "mine-2"

    call(llm, scenario)


def test_models(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        [model] = (await scene.stub.ListModels(pb.ListModelsRequest())).models
        assert (model.name, list(model.aliases), model.version) == ("tiny", ["other"], "1")
        assert (model.max_model_len, model.supports_chat, model.supports_text) == (1024, True, True)
        for name in ("tiny", "other", ""):
            answer = await scene.stub.Generate(pb.GenerateRequest(model=name, text="x", sampling=generate().sampling))
            assert answer.model == "tiny"
        error = await failure(scene.stub.Generate(pb.GenerateRequest(model="absent", text="x")))
        assert error.code() == grpc.StatusCode.NOT_FOUND
        assert metadata(error)["inferencex-error-code"] == "model_not_found"
        assert metadata(error)["inferencex-error-param"] == "model"

    call(llm, scenario)


def test_a_full_queue_says_when_to_come_back(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        seats = llm.engine.options.max_num_seqs
        streams = [scene.stub.GenerateStream(endless()) for _ in range(seats + 1)]
        for stream in streams:
            await stream.read()  # it was accepted
        error = await failure(scene.stub.Generate(generate()))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        details = metadata(error)
        assert details["inferencex-error-code"] == "queue_full"
        assert int(details["retry-after"]) >= 1
        assert int(details["grpc-retry-pushback-ms"]) >= 1000
        for stream in streams:
            stream.cancel()
        assert await scene.service.drained(30)
        assert (await scene.stub.Generate(generate())).choices

    call(llm, scenario, limits=ServiceLimits(max_queue=1))


def test_a_server_that_drains_refuses_and_finishes(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        stream = scene.stub.GenerateStream(generate(max_tokens=100, ignore_eos=True))
        await stream.read()
        scene.service.begin_drain()
        error = await failure(scene.stub.Generate(generate()))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert metadata(error)["inferencex-error-code"] == "shutting_down" and "retry-after" in metadata(error)
        events = await read_all(stream)
        assert events[-1].finished.usage.completion_tokens == 100

    call(llm, scenario)


def test_stopping_the_server_ends_what_still_runs(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        stream = scene.stub.GenerateStream(endless())
        await stream.read()
        reading = asyncio.ensure_future(read_all(stream))
        await scene.server.stop(0)
        error = await failure(reading)
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert await scene.service.drained(30)

    call(llm, scenario)


def test_what_the_server_ends_is_told(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        stream = scene.stub.GenerateStream(endless())
        await stream.read()
        scene.service.end_all()
        error = await failure(read_all(stream))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert metadata(error)["inferencex-error-code"] == "shutting_down"

    call(llm, scenario)


class Stuck:
    """The context of a call whose client has stopped reading: the first message goes out, and nothing after it."""

    def __init__(self) -> None:
        self.num_written = 0
        self.status: tuple[grpc.StatusCode, str] | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> float | None:
        return None

    async def send_initial_metadata(self, entries: object) -> None:
        pass

    async def write(self, message: object) -> None:
        self.num_written += 1
        if self.num_written > 1:
            await asyncio.Event().wait()

    async def abort(self, code: grpc.StatusCode, details: str, trailing: object) -> None:
        self.status = code, details
        raise grpc.aio.AbortError


def test_a_client_that_does_not_read_holds_nothing(llm: LLM) -> None:
    async def run() -> None:
        async with serving(llm) as service:
            servicer = InferenceServicer(service, NO_KEYS, send_timeout=0.05)
            for method, request in (
                (servicer.GenerateStream, endless()),
                (servicer.ChatStream, chat(max_tokens=LONG)),
            ):
                context = Stuck()
                with pytest.raises(grpc.aio.AbortError):
                    await method(request, context)
                assert context.num_written == 2
                assert context.status == (grpc.StatusCode.DEADLINE_EXCEEDED, "nothing was read for 0.05 s")
                assert await service.drained(30)

    asyncio.run(run())


def test_messages_are_limited_in_size(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        error = await failure(scene.stub.Generate(generate("x" * 200_000)))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await scene.stub.Generate(generate())).choices

    call(llm, scenario, max_body_bytes=100_000)


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x12\x02\xff\xfe", b"\x12\xff\xff\xff\xff\x0f"])
def test_bytes_that_are_no_message(llm: LLM, data: bytes) -> None:
    async def scenario(scene: Scene) -> None:
        for method in ("Generate", "Chat"):
            raw = scene.channel.unary_unary(f"/inferencex.v1.InferenceService/{method}")
            error = await failure(raw(data))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
        assert (await scene.stub.Generate(generate())).choices

    call(llm, scenario)
