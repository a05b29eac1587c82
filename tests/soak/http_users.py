"""Users of the HTTP API: patient ones, ones that leave, and ones that ask for what cannot be."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema

from tests.soak.exchange import Address, Exchange, refusal
from tests.soak.tally import Outcome, WrongAnswer

GREEDY = {"temperature": 0, "ignore_eos": True}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPTS = ("Once upon a time", "Water boils at", "isn't it? " * 12, "1234567890" * 8, "Größe, naïve café")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
PATTERN = "[a-f]{3}-[0-9]{2}"
INVALID: tuple[tuple[str, bytes, int], ...] = (
    (COMPLETIONS, b'{"prompt":"a","model":"nobody"}', 404),
    (COMPLETIONS, b'{"prompt":', 400),
    (COMPLETIONS, b'{"prompt":"a","max_tokens":100000}', 400),
    (COMPLETIONS, b'{"prompt":"a","temperature":-1}', 400),
    (CHATS, b'{"messages":[]}', 400),
    (CHATS, b"[" * 1000, 400),
    (CHATS, b'{"messages":[{"role":"user","content":"\xff"}]}', 400),
    ("/v1/nothing", b"{}", 404),
    ("/v1/embeddings", b'{"input":[]}', 400),
)


@dataclass(frozen=True)
class Case:
    """A request whose answers are known: what they are does not depend on what else the server does."""

    path: str
    body: Mapping[str, Any]
    texts: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        """Number of answers."""
        return int(self.body.get("n", 1))

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return self.n * int(self.body["max_tokens"])


def cases() -> list[Case]:
    """Return requests whose answers are still to be asked for."""
    bodies: list[tuple[str, dict[str, Any]]] = []
    for number, prompt in enumerate(PROMPTS):
        length = (8, 16, 40, 80, 24)[number]
        bodies.append((COMPLETIONS, {"prompt": prompt, "max_tokens": length, **GREEDY}))
        messages = [{"role": "user", "content": prompt}]
        bodies.append((CHATS, {"messages": messages, "max_tokens": length, **GREEDY}))
    several = {"max_tokens": 12, "n": 3, "seed": 5, "temperature": 1.0, "ignore_eos": True}
    bodies.append((COMPLETIONS, {"prompt": PROMPTS[0], **several}))
    bodies.append((CHATS, {"messages": [{"role": "user", "content": PROMPTS[0]}], **several}))
    return [Case(path, body) for path, body in bodies]


def text_of(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice, whole or of a stream."""
    if "text" in choice:
        return str(choice["text"])
    message = choice.get("message") or choice.get("delta") or {}
    return str(message.get("content") or "")


async def ask(address: Address, path: str, body: Mapping[str, Any]) -> Any:
    """Return the JSON of an answer; None when the server was too busy to give one."""
    async with Exchange(address) as exchange:
        exchange.send(path, json.dumps(body).encode())
        status = await exchange.begin()
        if status == 200:
            return await exchange.json()
        error = await refusal(exchange)
        if status != 429:
            raise WrongAnswer(f"{path}: status {status}: {error}")
        return None


async def solved(address: Address, case: Case) -> Case:
    """Return a case with its answers, which nobody else disturbs yet."""
    answer = await ask(address, case.path, case.body)
    return Case(case.path, case.body, tuple(text_of(choice) for choice in answer["choices"]))


class HttpUser:
    """Does one of many things at a time, chosen at random."""

    def __init__(self, address: Address, known: list[Case], chance: random.Random) -> None:
        self._address = address
        self._known = known
        self._chance = chance
        self._habits: list[tuple[str, int, Callable[[], Awaitable[Outcome]]]] = [
            ("whole", 20, self.whole),
            ("streamed", 20, self.streamed),
            ("json schema", 4, self.structured),
            ("regex", 4, self.regex),
            ("responses", 4, self.responses),
            ("embeddings", 3, self.embeddings),
            ("tokens", 3, self.tokens),
            ("stream left", 10, self.leaves_a_stream),
            ("answer not awaited", 8, self.leaves_early),
            ("upload broken off", 6, self.breaks_off),
            ("invalid", 8, self.invalid),
            ("wrong key", 2, self.wrong_key),
        ]

    def next(self) -> tuple[str, Awaitable[Outcome]]:
        """Return the kind of the next request, and the request."""
        weights = [weight for _, weight, _ in self._habits]
        [(kind, _, habit)] = self._chance.choices(self._habits, weights)
        return kind, habit()

    async def whole(self) -> Outcome:
        """Ask, and wait for the answer."""
        case = self._chance.choice(self._known)
        answer = await ask(self._address, case.path, case.body)
        if answer is None:
            return Outcome.REJECTED
        texts = tuple(text_of(choice) for choice in answer["choices"])
        if texts != case.texts or answer["usage"]["completion_tokens"] != case.tokens:
            raise WrongAnswer(f"{case.body} was answered with {texts}, expected {case.texts}")
        return Outcome.OK

    async def streamed(self) -> Outcome:
        """Read a stream to its end."""
        case = self._chance.choice(self._known)
        texts, finished, usage, last = [""] * case.n, 0, None, b""
        body = {**case.body, "stream": True, "stream_options": {"include_usage": True}}
        async with Exchange(self._address) as exchange:
            exchange.send(case.path, json.dumps(body).encode())
            if await exchange.begin() != 200:
                return await self._busy(exchange)
            async for last in exchange.events():
                if last == b"[DONE]":
                    continue
                event = json.loads(last)
                if "error" in event:
                    raise WrongAnswer(f"an error within a stream: {event}")
                usage = event["usage"] or usage
                for choice in event["choices"]:
                    texts[choice["index"]] += text_of(choice)
                    finished += choice["finish_reason"] is not None
        if last != b"[DONE]" or finished != case.n or usage is None or usage["completion_tokens"] != case.tokens:
            raise WrongAnswer(f"a stream ended with {last!r}, {finished} of {case.n} answers finished, usage {usage}")
        if tuple(texts) != case.texts:
            raise WrongAnswer(f"{case.body} was streamed as {texts}, expected {case.texts}")
        return Outcome.OK

    async def structured(self) -> Outcome:
        """Demand JSON of a schema."""
        form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
        return await self._formed({"response_format": form}, lambda text: jsonschema.validate(json.loads(text), SCHEMA))

    async def regex(self) -> Outcome:
        """Demand a text that a regular expression matches."""

        def check(text: str) -> None:
            if re.fullmatch(PATTERN, text) is None:
                raise WrongAnswer(f"{text!r} does not match {PATTERN}")

        return await self._formed({"guided_regex": PATTERN}, check)

    async def responses(self) -> Outcome:
        """Ask the other API, with a stream."""
        body = {"input": "Once upon a time", "max_output_tokens": 12, "temperature": 0, "stream": True}
        async with Exchange(self._address) as exchange:
            exchange.send("/v1/responses", json.dumps(body).encode())
            if await exchange.begin() != 200:
                return await self._busy(exchange)
            last = [event async for event in exchange.events()][-1]
        if b'"type":"response.incomplete"' not in last and b'"type":"response.completed"' not in last:
            raise WrongAnswer(f"a stream of /v1/responses ended with {last[-300:]!r}")
        return Outcome.OK

    async def embeddings(self) -> Outcome:
        """Ask for vectors."""
        answer = await ask(self._address, "/v1/embeddings", {"input": list(PROMPTS[:3])})
        if answer is not None and len(answer["data"]) != 3:
            raise WrongAnswer(f"{len(answer['data'])} vectors for 3 texts")
        return Outcome.REJECTED if answer is None else Outcome.OK

    async def tokens(self) -> Outcome:
        """Have a text cut into tokens, and put together again."""
        text = self._chance.choice(PROMPTS)
        found = await ask(self._address, "/tokenize", {"prompt": text, "add_special_tokens": False})
        back = await ask(self._address, "/detokenize", {"tokens": found["tokens"]})
        if back["prompt"] != text:
            raise WrongAnswer(f"{text!r} came back as {back}")
        return Outcome.OK

    async def leaves_a_stream(self) -> Outcome:
        """Read a few events of a long stream, and go."""
        body = {"prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True, "stream": True, "n": 2}
        wanted = self._chance.randrange(30)
        async with Exchange(self._address) as exchange:
            exchange.send(COMPLETIONS, json.dumps(body).encode())
            if wanted and await exchange.begin() != 200:
                return await self._busy(exchange)
            if wanted:
                async for _ in exchange.events():
                    wanted -= 1
                    if not wanted:
                        break
            if self._chance.random() < 0.5:
                exchange.leave()
        return Outcome.ABORTED

    async def leaves_early(self) -> Outcome:
        """Ask for a long answer, and go before it can be there."""
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 600, "ignore_eos": True}
        async with Exchange(self._address) as exchange:
            exchange.send(CHATS, json.dumps(body).encode())
            await asyncio.sleep(self._chance.random() * 0.05)
            if self._chance.random() < 0.5:
                exchange.leave()
        return Outcome.ABORTED

    async def breaks_off(self) -> Outcome:
        """Go before all of the request is sent."""
        body = json.dumps({"prompt": "a" * 5000, "max_tokens": 5}).encode()
        async with Exchange(self._address) as exchange:
            exchange.send(COMPLETIONS, body, part=self._chance.random() * 0.99)
            await asyncio.sleep(self._chance.random() * 0.02)
        return Outcome.ABORTED

    async def invalid(self) -> Outcome:
        """Ask for what cannot be."""
        path, body, expected = self._chance.choice(INVALID)
        async with Exchange(self._address) as exchange:
            exchange.send(path, body)
            status = await exchange.begin()
            error = await refusal(exchange)
        if status not in (expected, 429):  # a server that is too busy does not look at a request
            raise WrongAnswer(f"{path} with {body[:80]!r}: status {status}, expected {expected}: {error}")
        return Outcome.REJECTED

    async def wrong_key(self) -> Outcome:
        """Ask with a key that is none."""
        async with Exchange(self._address) as exchange:
            exchange.send(COMPLETIONS, b'{"prompt":"a"}', key="some-other-key")
            status = await exchange.begin()
            await refusal(exchange)
        if status != 401:
            raise WrongAnswer(f"a wrong key: status {status}")
        return Outcome.REJECTED

    async def _formed(self, fields: Mapping[str, Any], check: Callable[[str], None]) -> Outcome:
        messages = [{"role": "user", "content": self._chance.choice(PROMPTS)}]
        answer = await ask(self._address, CHATS, {"messages": messages, "max_tokens": 200, **fields})
        if answer is None:
            return Outcome.REJECTED
        check(text_of(answer["choices"][0]))
        return Outcome.OK

    async def _busy(self, exchange: Exchange) -> Outcome:
        error = await refusal(exchange)
        if exchange.status != 429:
            raise WrongAnswer(f"status {exchange.status}: {error}")
        return Outcome.REJECTED
