"""A server with OpenAI's API and no model: every word is a token, and what it answers is scripted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self


@dataclass
class Reply:
    """An answer: pieces that are written one after the other; a connection that is closed after them."""

    status: int = 200
    content_type: str = "application/json"
    pieces: Sequence[bytes] = ()
    chunked: bool = False
    close: bool = False


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def token(text: str, finish_reason: str | None = None, *, chat: bool = False) -> str:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    choice |= {"delta": {"content": text} if text else {}} if chat else {"text": text}
    return json.dumps({"id": "x", "choices": [choice]})


def usage(prompt: int, output: int) -> str:
    return json.dumps({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


def streamed(events: Sequence[str], *, done: bool = True) -> Reply:
    pieces = [event(data) for data in (*events, *(("[DONE]",) if done else ()))]
    return Reply(content_type="text/event-stream", pieces=pieces, chunked=True)


def failed(status: int, message: str) -> Reply:
    return Reply(status, pieces=[json.dumps({"error": {"message": message, "code": None}}).encode()])


def plain(body: dict[str, Any]) -> Reply:
    """What a well-behaved server answers: as many tokens as were asked for."""
    count = body["max_tokens"]
    chat = "messages" in body
    prompt = body["messages"][0]["content"] if chat else body["prompt"]
    length = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    if not body.get("stream"):
        counts = {"prompt_tokens": length, "completion_tokens": count}
        choice = {"finish_reason": "length", **({"message": {"content": "a"}} if chat else {"text": "a"})}
        return Reply(pieces=[json.dumps({"choices": [choice], "usage": counts}).encode()])
    first = [json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]})] if chat else []
    tokens = [token("a", chat=chat)] * count
    return streamed([*first, *tokens, token("", "length", chat=chat), usage(length, count)])


@dataclass
class FakeServer:
    """Listens in a thread of its own; `bodies` has the requests for answers, in the order in which they came."""

    answer: Callable[[dict[str, Any]], Reply] = plain
    models: Sequence[str] = ("tiny",)
    tokenizes: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    port: int = 0
    connections: int = 0
    most_at_once: int = 0
    vocabulary: dict[str, int] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        self._port = self._server.sockets[0].getsockname()[1]
        self._at_once = 0
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *fields = head.decode().rstrip().split("\r\n")
                headers = {name.lower(): value for name, value in (each.split(": ", 1) for each in fields)}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                reply = await self._reply(line.split()[1], headers, json.loads(content or b"{}"))
                await self._write(writer, reply)
                if reply.close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is gone
        finally:
            writer.close()

    async def _write(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        length = "Transfer-Encoding: chunked" if reply.chunked else f"Content-Length: {sum(map(len, reply.pieces))}"
        writer.write(f"HTTP/1.1 {reply.status} X\r\nContent-Type: {reply.content_type}\r\n{length}\r\n\r\n".encode())
        for piece in reply.pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if reply.chunked else piece)
            await writer.drain()
        if reply.chunked and not reply.close:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _reply(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Reply:
        if path == "/v1/models":
            return Reply(pieces=[json.dumps({"data": [{"id": name} for name in self.models]}).encode()])
        if path == "/tokenize" and self.tokenizes and "prompt" in body:
            ids = [self.vocabulary.setdefault(word, len(self.vocabulary) + 10) for word in body["prompt"].split()]
            return Reply(pieces=[json.dumps({"tokens": [1] * body["add_special_tokens"] + ids}).encode()])
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return failed(404, "Not Found")
        self.bodies.append(body)
        self.headers.append(headers)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            for _ in range(20):  # give other requests the turn, so that those of one time overlap
                await asyncio.sleep(0)
            return self.answer(body)
        finally:
            self._at_once -= 1
