"""Users of the WebSocket and of gRPC."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable
from typing import Any

import grpc
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from inferencex.runtime.server.grpc.v1 import inference_pb2 as pb
from inferencex.runtime.server.grpc.v1 import inference_pb2_grpc
from tests.soak.exchange import Address
from tests.soak.http_users import COMPLETIONS, Case
from tests.soak.tally import Outcome, ServerGone, WrongAnswer

GOING_AWAY = 1001  # RFC 6455, section 7.4.1
LONG = {"prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True}


class WebSocketUser:
    """Has several generations written side by side on one socket, gives one of them up, and sometimes just goes."""

    def __init__(self, address: Address, known: list[Case], chance: random.Random) -> None:
        self._address = address
        self._known = [case for case in known if case.path == COMPLETIONS and case.n == 1]
        self._chance = chance

    def next(self) -> tuple[str, Awaitable[Outcome]]:
        """Return the kind of the next session, and the session."""
        return ("websocket left", self.leaves()) if self._chance.random() < 0.3 else ("websocket", self.session())

    async def session(self) -> Outcome:
        """Wait for two answers, and cancel a third request."""
        cases = {str(number): self._chance.choice(self._known) for number in range(2)}
        texts, open_ids, rejected = dict.fromkeys(cases, ""), {*cases, "long"}, False
        async with self._connected() as socket:
            for name, case in cases.items():
                await socket.send(json.dumps({"type": "generate", "id": name, **case.body}))
            await socket.send(json.dumps({"type": "generate", "id": "long", **LONG}))
            await socket.send(json.dumps({"type": "cancel", "id": "long"}))
            while open_ids:
                message = json.loads(await self._heard(socket))
                if message["type"] == "delta":
                    for choice in message["choices"]:
                        if message["id"] in texts:
                            texts[message["id"]] += choice["text"]
                elif message["type"] in ("done", "cancelled"):
                    open_ids.remove(message["id"])
                elif message["type"] == "error":
                    _check_error(message)
                    open_ids.discard(message["id"])
                    texts.pop(message["id"], None)
                    rejected = True
        for name, text in texts.items():
            if text != cases[name].texts[0]:
                raise WrongAnswer(f"{cases[name].body} was answered with {text!r}, expected {cases[name].texts}")
        return Outcome.REJECTED if rejected else Outcome.OK

    async def leaves(self) -> Outcome:
        """Go while something is written."""
        async with self._connected() as socket:
            await socket.send(json.dumps({"type": "generate", "id": "1", **LONG}))
            await self._heard(socket)
            socket.transport.abort()
        return Outcome.ABORTED

    def _connected(self) -> Any:
        return _Connected(self._address)

    async def _heard(self, socket: Any) -> Any:
        try:
            return await socket.recv()
        except ConnectionClosed as error:
            if error.rcvd is None or error.rcvd.code != GOING_AWAY:
                raise
            raise ServerGone("the server said that it goes away", answered=True) from error


class _Connected:
    """A socket for the length of a block."""

    def __init__(self, address: Address) -> None:
        headers = {"Authorization": f"Bearer {address.key}"}
        self._connect = connect(
            f"ws://{address.host}:{address.port}/v1/stream", additional_headers=headers, compression=None, proxy=None
        )

    async def __aenter__(self) -> Any:
        try:
            self._socket = await self._connect
        except ConnectionRefusedError as error:
            raise ServerGone("the connection was refused", answered=False) from error
        return self._socket

    async def __aexit__(self, *exc: object) -> None:
        await self._socket.close()


def _check_error(message: dict[str, Any]) -> None:
    code = message["error"]["code"]
    if code == "shutting_down":
        raise ServerGone("the server shuts down", answered=True)
    if code not in ("queue_full", "rate_limit_exceeded", "unknown_id"):
        raise WrongAnswer(f"a WebSocket said {message}")


class GrpcUser:
    """Calls whole and streamed, and gives some of the calls up."""

    def __init__(self, address: Address, known: list[Case], chance: random.Random, channel: grpc.aio.Channel) -> None:
        self._known = [case for case in known if case.path == COMPLETIONS and case.n == 1]
        self._chance = chance
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {address.key}"),)

    def next(self) -> tuple[str, Awaitable[Outcome]]:
        """Return the kind of the next call, and the call."""
        habits = (("grpc", self.whole), ("grpc streamed", self.streamed), ("grpc left", self.leaves))
        kind, habit = self._chance.choice(habits)
        return kind, self._called(habit())

    async def whole(self) -> Outcome:
        """Wait for an answer."""
        case = self._chance.choice(self._known)
        answer = await self._stub.Generate(_request(case.body), metadata=self._metadata)
        if answer.choices[0].text != case.texts[0]:
            raise WrongAnswer(f"{case.body} was answered with {answer.choices[0].text!r}, expected {case.texts}")
        return Outcome.OK

    async def streamed(self) -> Outcome:
        """Read a stream to its end."""
        case = self._chance.choice(self._known)
        text, last = "", ""
        async for event in self._stub.GenerateStream(_request(case.body), metadata=self._metadata):
            last = event.WhichOneof("event")
            text += event.delta.text
        if last != "finished" or text != case.texts[0]:
            raise WrongAnswer(f"{case.body} was streamed as {text!r} until {last}, expected {case.texts}")
        return Outcome.OK

    async def leaves(self) -> Outcome:
        """Cancel a stream."""
        call = self._stub.GenerateStream(_request(LONG), metadata=self._metadata)
        wanted = self._chance.randrange(1, 20)
        async for _ in call:
            wanted -= 1
            if not wanted:
                break
        call.cancel()
        return Outcome.ABORTED

    async def _called(self, call: Awaitable[Outcome]) -> Outcome:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return Outcome.REJECTED
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                answered = "shutting down" in (error.details() or "")
                raise ServerGone(f"gRPC: {error.details()}", answered=answered) from error
            raise


def _request(body: Any) -> Any:
    sampling = {"max_tokens": body["max_tokens"], "temperature": 0.0, "ignore_eos": True}
    return pb.GenerateRequest(text=body["prompt"], sampling=pb.SamplingParams(**sampling))
