"""`inferencex.v1.InferenceService`, on the service that all protocols share."""

from __future__ import annotations

import asyncio

from google.protobuf.message import Message

from inferencex.runtime.server.access.keys import KeyStore
from inferencex.runtime.server.errors import TimedOut
from inferencex.runtime.server.grpc import answers
from inferencex.runtime.server.grpc.access import receive
from inferencex.runtime.server.grpc.chat_answers import ChatDeltas, chat_response
from inferencex.runtime.server.grpc.requests import generate_call, read_chat
from inferencex.runtime.server.grpc.status import Context, answered
from inferencex.runtime.server.grpc.v1 import inference_pb2 as pb
from inferencex.runtime.server.grpc.v1 import inference_pb2_grpc
from inferencex.runtime.server.service import InferenceService


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Every call is a coroutine that writes to its context: when gRPC cancels it, its generation is closed at once.

    send_timeout: seconds that a client may take to make room for a message of its stream
    """

    def __init__(self, service: InferenceService, keys: KeyStore, send_timeout: float) -> None:
        self._service = service
        self._keys = keys
        self._send_timeout = send_timeout

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse | None:
        """Continue a prompt."""
        async with answered(context):
            incoming = await receive(context, self._keys)
            call = generate_call(request, incoming, stream=False)
            async with await self._service.start(call, incoming.caller) as generation:
                return answers.generate_response(generation, await generation.result())
        return None

    async def GenerateStream(self, request: pb.GenerateRequest, context: Context) -> None:
        """Continue a prompt, and send what each step adds."""
        async with answered(context):
            incoming = await receive(context, self._keys)
            call = generate_call(request, incoming, stream=True)
            async with await self._service.start(call, incoming.caller) as generation:
                await self._write(context, pb.GenerateStreamResponse(started=answers.started(generation)))
                async for delta in generation:
                    message = answers.generate_delta(delta, generation.params.logprobs)
                    await self._write(context, pb.GenerateStreamResponse(delta=message))
                await self._write(context, pb.GenerateStreamResponse(finished=answers.finished(generation)))

    async def Chat(self, request: pb.ChatRequest, context: Context) -> pb.ChatResponse | None:
        """Answer a conversation."""
        async with answered(context):
            incoming = await receive(context, self._keys)
            chat = read_chat(request, incoming, self._service, stream=False)
            async with await self._service.start(chat.call, incoming.caller) as generation:
                return chat_response(chat, generation, await generation.result())
        return None

    async def ChatStream(self, request: pb.ChatRequest, context: Context) -> None:
        """Answer a conversation, and send what each step adds."""
        async with answered(context):
            incoming = await receive(context, self._keys)
            chat = read_chat(request, incoming, self._service, stream=True)
            async with await self._service.start(chat.call, incoming.caller) as generation:
                deltas = ChatDeltas(chat, generation)
                await self._write(context, pb.ChatStreamResponse(started=answers.started(generation)))
                async for delta in generation:
                    message = deltas.message(delta)
                    if message is not None:
                        await self._write(context, pb.ChatStreamResponse(delta=message))
                await self._write(context, pb.ChatStreamResponse(finished=answers.finished(generation)))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse | None:
        """List the models that can be asked."""
        async with answered(context):
            await receive(context, self._keys)
            models = self._service.registry.list()
            return pb.ListModelsResponse(models=[answers.model_message(model) for model in models])
        return None

    async def _write(self, context: Context, message: Message) -> None:
        try:
            async with asyncio.timeout(self._send_timeout):
                await context.write(message)
        except TimeoutError as error:
            raise TimedOut(f"nothing was read for {self._send_timeout:g} s", code="slow_reader") from error
