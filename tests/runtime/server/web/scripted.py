"""A server with the page, whose model says what a test wants, when the test wants it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from inferencex.runtime.server.web import router

HOLD_SECONDS = 30.0  # longer than any test waits
HOLD = object()  # a piece of an answer at which the server waits for `Script.go_on`


@dataclass
class Script:
    """What the server answers, and what it was asked. Each chat takes the next of `answers`.

    An answer is a list of pieces: texts, dictionaries (a delta, or an error event), seconds to wait, or HOLD. In
    place of a list it can be an error's `(status, body, headers)`.
    """

    answers: deque[Any] = field(default_factory=deque)
    models: list[str] = field(default_factory=lambda: ["tiny", "large"])
    key: str | None = None
    status: dict[str, Any] = field(default_factory=dict)
    statuses: Iterator[dict[str, Any]] = field(default_factory=lambda: iter(()))  # go before `status`, while they last
    asked: list[dict[str, Any]] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)  # a client went before the end

    def reset(self) -> None:
        self.go_on.set()  # whoever waits still waits for this
        self.__init__()  # type: ignore[misc]
        self.status = {"ready": True, "draining": False, "models": [model_status()]}


def model_status(**values: Any) -> dict[str, Any]:
    """One model as `/v1/status` reports it."""
    return {
        "running": 0,
        "waiting": 0,
        "kv_blocks": 100,
        "kv_blocks_used": 0,
        "block_size": 16,
        "generated_tokens": 0,
        "prompt_tokens": 0,
        "cached_tokens": 0,
    } | values


def scripted_app(script: Script) -> FastAPI:
    """The page, and as much of the API as it uses."""
    app = FastAPI(openapi_url=None)
    app.include_router(router())

    def denied(request: Request) -> Response | None:
        if script.key is None or request.headers.get("authorization") == f"Bearer {script.key}":
            return None
        return JSONResponse({"error": {"message": "a key is needed", "code": "invalid_api_key"}}, status_code=401)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        listed = {"object": "list", "data": [{"id": name, "object": "model"} for name in script.models]}
        return denied(request) or JSONResponse(listed)

    @app.get("/v1/status")
    async def status(request: Request) -> Response:
        return denied(request) or JSONResponse(next(script.statuses, script.status))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        if refusal := denied(request):
            return refusal
        script.asked.append(await request.json())
        answer = script.answers.popleft()
        if isinstance(answer, tuple):
            code, body, headers = answer
            return JSONResponse(body, status_code=code, headers=headers)
        return StreamingResponse(events(script, answer), media_type="text/event-stream")

    return app


async def events(script: Script, pieces: Sequence[Any]) -> AsyncIterator[str]:
    go_on, left, finished = script.go_on, script.left, False
    try:
        count = 0
        for piece in pieces:
            if piece is HOLD:
                await asyncio.to_thread(go_on.wait, HOLD_SECONDS)
            elif isinstance(piece, float):
                await asyncio.sleep(piece)
            elif isinstance(piece, dict) and "error" in piece:
                yield f"data: {json.dumps(piece)}\n\n"
                return
            else:
                count += 1
                delta = {"content": piece} if isinstance(piece, str) else piece
                yield chunk([{"index": 0, "delta": delta, "finish_reason": None}])
        yield chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}])
        yield chunk([], usage={"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count})
        yield "data: [DONE]\n\n"
        finished = True
    finally:
        if not finished:
            left.set()


def chunk(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": choices, "usage": usage}
    return f"data: {json.dumps(body)}\n\n"
