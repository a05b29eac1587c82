"""A server that listens, and a client that calls it, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from inferencex.runtime import LLM
from inferencex.runtime.server.access.keys import KeyStore
from inferencex.runtime.server.config.settings import ServerSettings, Settings
from inferencex.runtime.server.grpc.server import GrpcServer, start_grpc
from inferencex.runtime.server.grpc.v1 import inference_pb2 as pb
from inferencex.runtime.server.grpc.v1 import inference_pb2_grpc
from inferencex.runtime.server.service import InferenceService, ServiceLimits
from tests.runtime.server.serving import LONG, serving

NO_KEYS = KeyStore()


@dataclass
class Scene:
    service: InferenceService
    server: GrpcServer
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceServiceStub


@asynccontextmanager
async def listening(service: InferenceService, keys: KeyStore = NO_KEYS, **options: Any) -> AsyncIterator[Scene]:
    """Listen with these options of `server`, and connect."""
    settings = Settings(server=ServerSettings(grpc_port=0, **options))
    server = await start_grpc(service, settings, keys)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield Scene(service, server, channel, inference_pb2_grpc.InferenceServiceStub(channel))
    finally:
        await server.stop(0)


def call(
    llm: LLM,
    scenario: Callable[[Scene], Awaitable[None]],
    keys: KeyStore = NO_KEYS,
    limits: ServiceLimits | None = None,
    **options: Any,
) -> None:
    """Run a scenario against a model that is served; in the end nothing may be left of its requests."""

    async def run() -> None:
        async with serving(llm, limits) as service, listening(service, keys, **options) as scene:
            await scenario(scene)

    asyncio.run(asyncio.wait_for(run(), 60))


def generate(text: str = "once upon", **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**{"temperature": 0, "max_tokens": 8, **sampling}))


def endless() -> pb.GenerateRequest:
    return generate(max_tokens=LONG, ignore_eos=True)


def chat(content: str = "hello", **fields: Any) -> pb.ChatRequest:
    sampling = pb.SamplingParams(temperature=0, max_tokens=fields.pop("max_tokens", 8))
    return pb.ChatRequest(messages=[pb.ChatMessage(role="user", content=content)], sampling=sampling, **fields)


async def failure(awaitable: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """Return the error that a call ends with."""
    try:
        answer = await awaitable
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"the call succeeded: {answer}")


def metadata(error: grpc.aio.AioRpcError) -> dict[str, str]:
    return dict(error.trailing_metadata())


async def read_all(stream: grpc.aio.UnaryStreamCall) -> list[Any]:
    """Return what is left of a stream."""
    events = []
    while (event := await stream.read()) is not grpc.aio.EOF:
        events.append(event)
    return events
