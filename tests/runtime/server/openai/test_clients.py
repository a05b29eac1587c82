"""Clients that leave, and the official one."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.runtime.server.openai.serving import MODEL, Serve, Served, serve, with_template
from tests.runtime.server.openai.test_chat import CALL, HERMES, TOOLS, shared_template

ENDLESS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["the cat", "on"], "n": 2, "temperature": 1, "max_tokens": 4000, "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "ignore_eos": True},
    "/v1/responses": {"input": "x", "max_output_tokens": 4000},
}


class Leaving:
    """A client that sends a request, reads so many pieces of the answer, and closes the connection."""

    _leaves = True

    def __init__(self, app: Any, path: str, body: Any, pieces: int) -> None:
        self._app = app
        self._path = path
        self._sent = False
        self._body = json.dumps(body).encode()
        self._left = asyncio.Event()
        self._pieces = pieces
        self.received = b""
        if pieces == 0:
            asyncio.get_running_loop().call_later(0.02, self._left.set)

    async def run(self) -> None:
        headers = [(b"content-type", b"application/json"), (b"host", b"server")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "headers": headers,
        }
        scope |= {"query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1"}
        scope |= {"server": ("server", 80), "client": ("client", 1), "asgi": {"version": "3.0", "spec_version": "2.3"}}
        await asyncio.wait_for(self._app(scope, self._receive, self._send), 20)

    async def _receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            self.received += message["body"]
            self._pieces -= 1
            if self._pieces == 0 and self._leaves:
                self._left.set()


@pytest.mark.parametrize("path", sorted(ENDLESS))
def test_whoever_leaves_is_not_computed_for(served: Serve, path: str) -> None:
    async def scenario(served: Served) -> None:
        for stream, pieces in ((True, 3), (True, 1), (True, 0), (False, 0)):
            client = Leaving(served.app, path, {**ENDLESS[path], "stream": stream}, pieces)
            await client.run()
            await served.service.drained(5)
            served.check_idle()
            assert not client.received.endswith(b"[DONE]\n\n")
        assert served.llm.stats.num_aborted_requests >= 4
        assert (await served.post("/v1/completions", {"prompt": "the cat"}))["choices"]

    served(scenario)


def test_two_hundred_clients_that_leave(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        pick = random.Random(5)
        clients = []
        for _ in range(200):
            path = pick.choice(sorted(ENDLESS))
            stream = pick.random() < 0.7
            body = {**ENDLESS[path], "stream": stream}
            clients.append(Leaving(served.app, path, body, pick.randrange(4) if stream else 0).run())
        await asyncio.gather(*clients)
        await served.service.drained(5)
        served.check_idle()
        assert (await served.post("/v1/completions", {"prompt": "the cat"}))["choices"]

    served(scenario, max_num_seqs=32)


@pytest.mark.parametrize("path", sorted(ENDLESS))
def test_whoever_does_not_read_holds_nothing(served: Serve, path: str) -> None:
    class Stuck(Leaving):
        _leaves = False  # the connection stays open

        async def _send(self, message: Any) -> None:
            await super()._send(message)
            if self._pieces < 0:
                await asyncio.Event().wait()

    async def scenario(served: Served) -> None:
        await Stuck(served.app, path, {**ENDLESS[path], "stream": True}, 1).run()
        await served.service.drained(5)
        served.check_idle()

    served(scenario)


def official(served: Served) -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(app=served.app)
    return openai.AsyncOpenAI(
        base_url="http://server/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=transport),
    )


class Answer(BaseModel):
    city: str
    days: int


def test_the_official_client(shared_data: Path, text_bundle: Path, backend: Any, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        client = official(served)
        user: Any = [{"role": "user", "content": "the cat?"}]
        tools: Any = TOOLS
        served.say("on the mat")
        completion = await client.completions.create(model=MODEL, prompt="x", logprobs=2)
        assert completion.choices[0].text == "on the mat" and completion.choices[0].logprobs is not None
        chat = await client.chat.completions.create(model=MODEL, messages=user, logprobs=True, top_logprobs=2)
        assert chat.choices[0].message.content == "on the mat" and chat.usage is not None
        stream = await client.chat.completions.create(
            model=MODEL, messages=user, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "on the mat"
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage is not None
        texts = [c.choices[0].text async for c in await client.completions.create(model=MODEL, prompt="x", stream=True)]
        assert "".join(texts) == "on the mat"
        response = await client.responses.create(model=MODEL, input="the cat?", instructions="Be brief.")
        assert response.output_text == "on the mat" and response.usage is not None
        async with client.responses.stream(model=MODEL, input="the cat?") as events:
            kinds = [event.type async for event in events]
            final = await events.get_final_response()
        assert kinds[0] == "response.created" and final.output_text == "on the mat"
        assert [model.id async for model in client.models.list()] == [MODEL]

        served.say(f"<tool_call>{CALL}</tool_call>")
        chat = await client.chat.completions.create(model=MODEL, messages=user, tools=tools)
        [call] = chat.choices[0].message.tool_calls or []
        assert call.type == "function" and json.loads(call.function.arguments) == {"city": "Bern"}
        strict: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
        async with client.chat.completions.stream(model=MODEL, messages=user, tools=strict) as chat_events:
            done = [event async for event in chat_events if event.type == "tool_calls.function.arguments.done"]
        assert done[0].name == "get_weather" and done[0].arguments == '{"city": "Bern"}'

        served.say('{"city": "Bern", "days": 3}')
        parsed = await client.chat.completions.parse(model=MODEL, messages=user, response_format=Answer)
        assert parsed.choices[0].message.parsed == Answer(city="Bern", days=3)
        answered = await client.responses.parse(model=MODEL, input="x", text_format=Answer)
        assert answered.output_parsed == Answer(city="Bern", days=3)

        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.completions.create(model=MODEL, prompt="x", temperature=-1)
        assert wrong.value.param == "temperature"
        await client.close()

    bundle = with_template(text_bundle, tmp_path / "bundle", shared_template(shared_data, HERMES))
    serve(bundle, scenario, backend, num_kv_blocks=1024)


def test_the_official_client_gets_embeddings(stories: Path) -> None:
    async def scenario(served: Served) -> None:
        client = official(served)
        told = await client.embeddings.create(model=MODEL, input=["Once upon a time"])
        plain = await client.embeddings.create(model=MODEL, input=["Once upon a time"], encoding_format="float")
        assert told.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
        await client.close()

    serve(stories, scenario, threads=1)
