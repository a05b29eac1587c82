"""The server under load: what is asked of it before the measurement, and the bodies of the requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from inferencex.formats.errors import RequestError
from inferencex.runtime.load_test.answers import error_message
from inferencex.runtime.load_test.connection import HttpClient, HttpFailure

Endpoint = Literal["completions", "chat"]
_PATHS: Mapping[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

Content = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A prompt: text, token ids, or the messages of a chat."""


@dataclass(frozen=True)
class RequestShape:
    """What all requests of a run have in common.

    extra: further fields of the body, for what a server has of its own
    """

    model: str
    endpoint: Endpoint = "completions"
    stream: bool = True
    temperature: float = 0.0
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Where requests are sent."""
        return _PATHS[self.endpoint]

    def body(self, content: Content, max_tokens: int) -> bytes:
        """Return a request's JSON."""
        body: dict[str, Any] = {"model": self.model}
        if self.endpoint == "completions":
            body["prompt"] = content
        else:
            body["messages"] = [{"role": "user", "content": content}] if isinstance(content, str) else content
        body |= {"max_tokens": max_tokens, "temperature": self.temperature, "stream": self.stream}
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps({**body, **self.extra}).encode()


class _Whole:
    def __init__(self) -> None:
        self.status = 0
        self.parts: list[bytes] = []

    def begin(self, status: int) -> None:
        self.status = status

    def body(self, data: bytes, now: float) -> None:
        self.parts.append(data)


@dataclass(frozen=True)
class Reply:
    """Status and body of an answer; `content` is its JSON, None when it is none."""

    status: int
    text: bytes
    content: Any


async def ask(client: HttpClient, method: str, path: str, body: Mapping[str, Any] | None = None) -> Reply:
    """Send one request; RequestError when the server does not answer."""
    reader = _Whole()
    try:
        await client.send(client.encode(method, path, b"" if body is None else json.dumps(body).encode()), reader)
    except HttpFailure as failure:
        raise RequestError(f"{failure}; is a server running there?") from failure
    text = b"".join(reader.parts)
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    return Reply(reader.status, text, content)


async def only_model(client: HttpClient) -> str:
    """Return the name of the model that the server has; RequestError where it does not have just one."""
    reply = await ask(client, "GET", "/v1/models")
    listed = reply.content.get("data") if isinstance(reply.content, dict) else None
    if reply.status != 200 or not isinstance(listed, list):
        said = error_message(reply.text) or "nothing"
        raise RequestError(f"{client.origin}/v1/models answered {reply.status}: {said}; give --model and --api-key")
    names = [str(entry["id"]) for entry in listed if isinstance(entry, dict) and "id" in entry]
    if len(names) != 1:
        raise RequestError(f"{client.origin} has the models {', '.join(names) or '(none)'}; name one by --model")
    return names[0]
