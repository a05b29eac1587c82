"""Frames and messages that are not what they should be, keys, and origins."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from inferencex.runtime import LLM
from inferencex.runtime.server.config.keys_setting import ApiKey, key_store
from inferencex.runtime.server.websocket import answers as answering
from inferencex.runtime.server.websocket import routes
from inferencex.runtime.server.websocket.origin import is_allowed
from inferencex.runtime.server.websocket.session import SessionLimits
from tests.runtime.server.websocket.client import Scene, converse, endless, prompt

KEYS = key_store((ApiKey(key="a-user-key", name="ann"),), ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ([], None, None),
        ("text", None, None),
        (None, None, None),
        ({}, "type", None),
        ({"type": 3}, "type", None),
        ({"type": "shout"}, "type", None),
        ({"type": ["generate"]}, "type", None),
        ({"type": "generate", "prompt": "x"}, "id", None),
        ({"type": "generate", "id": "", "prompt": "x"}, "id", None),
        ({"type": "generate", "id": 7, "prompt": "x"}, "id", None),
        ({"type": "generate", "id": "x" * 129, "prompt": "x"}, "id", None),
        ({"type": "ping", "id": {}}, "id", None),
        ({"type": "cancel"}, "id", None),
        ({"type": "cancel", "id": "absent"}, "id", "unknown_id"),
        ({"type": "auth"}, "key", None),
        ({"type": "auth", "key": 3}, "key", None),
        ({"type": "generate", "id": "g"}, "prompt", "missing_required_parameter"),
        ({"type": "generate", "id": "g", "prompt": 3}, "prompt", None),
        ({"type": "generate", "id": "g", "prompt": []}, "prompt", None),
        ({"type": "generate", "id": "g", "prompt": "x", "temperature": "hot"}, "temperature", "invalid_type"),
        ({"type": "generate", "id": "g", "prompt": "x", "temperature": -1}, "temperature", None),
        ({"type": "generate", "id": "g", "prompt": "x", "max_new_tokens": 3}, "max_new_tokens", "unknown_parameter"),
        ({"type": "generate", "id": "g", "prompt": "x", "max_tokens": 100_000}, None, "context_length_exceeded"),
        ({"type": "generate", "id": "g", "prompt": "x", "best_of": 2}, "best_of", None),
        ({"type": "generate", "id": "g", "prompt": "x", "guided_regex": "("}, None, None),
        ({"type": "generate", "id": "g", "prompt": "x", "model": "absent"}, "model", "model_not_found"),
        ({"type": "chat", "id": "g"}, "messages", "missing_required_parameter"),
        ({"type": "chat", "id": "g", "messages": []}, "messages", None),
        ({"type": "chat", "id": "g", "messages": [{"content": "x"}]}, "messages.0.role", None),
        ({"type": "chat", "id": "g", "messages": [{"role": "user", "content": "x"}], "top_k": 1.5}, "top_k", None),
    ],
)
def test_bad_messages_are_answered_and_the_socket_stays(
    llm: LLM, message: Any, param: str | None, code: str | None
) -> None:
    import json

    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket:
            socket.send(text=json.dumps(message))
            error = await socket.error()
            assert error["type"] in ("invalid_request_error", "not_found_error"), error
            assert error["message"]
            if code != "context_length_exceeded":
                assert error["param"] == param, error
            if code is not None:
                assert error["code"] == code, error
            named = message.get("id") if isinstance(message, dict) else None
            usable = isinstance(named, str) and 0 < len(named) <= 128
            assert error["id"] == (named if usable else None)
            socket.say(id="next", **prompt())
            await socket.hear_until("done", "next")

    converse(llm, scenario)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ({"text": "no json"}, 1007),
        ({"text": ""}, 1007),
        ({"text": '{"type": "ping"'}, 1007),
        ({"text": '{"type": "ping", "id": NaN}'}, 1007),
        ({"text": '{"type": "ping"} {"type": "ping"}'}, 1007),
        ({"bytes": b'{"type": "ping"}'}, 1003),
        ({"text": '{"type": "ping", "x": "' + "é" * 600 + '"}'}, 1009),
        ({"text": " " * 2000}, 1009),
    ],
)
def test_frames_that_are_no_json_end_the_socket(llm: LLM, frame: dict[str, Any], code: int) -> None:
    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket:
            socket.say(id="running", **endless())
            await socket.hear_until("delta", "running")
            socket.send(**frame)
            closed, reason = await socket.hear_close()
            assert closed == code and reason
            assert await scene.service.drained(30)

    converse(llm, scenario, max_body_bytes=1024)


def test_deep_json_and_half_characters_are_errors_only(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket:
            for text in ("[" * 5000 + "]" * 5000, r'{"type": "ping", "id": "\ud800"}'):
                socket.send(text=text)
                assert (await socket.error())["type"] == "invalid_request_error"
            socket.say(type="ping")
            assert (await socket.hear())["type"] == "pong"

    converse(llm, scenario)


def test_ids_are_taken_once_at_a_time(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket, scene.socket() as other:
            socket.say(id="a", **endless())
            await socket.hear_until("delta", "a")
            socket.say(id="a", **prompt())
            heard = await socket.hear_until("error", "a")
            assert heard[-1]["error"]["code"] == "duplicate_id"
            await socket.hear_until("delta", "a")  # the first goes on
            other.say(id="a", **prompt())  # ids are a socket's own
            await other.hear_until("done", "a")
            other.say(type="cancel", id="a")
            assert (await other.error())["code"] == "unknown_id"
            assert scene.service.num_running == 1

    converse(llm, scenario)


def test_a_socket_has_so_many_generations_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SessionLimits", partial(SessionLimits, max_generations=2))

    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket:
            for name in ("a", "b", "c"):
                socket.say(id=name, **endless())
            heard = await socket.hear_until("error", "c")
            assert heard[-1]["error"]["code"] == "too_many_generations"
            assert heard[-1]["error"]["type"] == "rate_limit_error"
            socket.say(type="cancel", id="a")
            await socket.hear_until("cancelled", "a")
            socket.say(id="c", **prompt())
            await socket.hear_until("done", "c")

    converse(llm, scenario)


@pytest.mark.parametrize("header", [True, False])
def test_keys(llm: LLM, header: bool) -> None:
    async def scenario(scene: Scene) -> None:
        async with scene.socket(**({"Authorization": "Bearer a-user-key"} if header else {})) as socket:
            if not header:
                socket.say(id="early", **prompt())
                assert (await socket.error())["type"] == "authentication_error"
                socket.say(type="auth", key="a-user-key")
                assert await socket.hear() == {"type": "authenticated", "id": None}
            socket.say(id="a", **prompt())
            await socket.hear_until("done", "a")

    converse(llm, scenario, KEYS)


@pytest.mark.parametrize("header", [True, False])
def test_a_wrong_key_ends_the_socket(llm: LLM, header: bool) -> None:
    async def scenario(scene: Scene) -> None:
        async with scene.socket(**({"Authorization": "Bearer a-wrong-key"} if header else {})) as socket:
            if not header:
                socket.say(type="auth", key="a-wrong-key")
            error = await socket.error()
            assert error["code"] == "invalid_api_key" and "a-wrong-key" not in error["message"]
            assert (await socket.hear_close())[0] == 1008

    converse(llm, scenario, KEYS)


def test_who_sends_no_key_is_not_waited_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SessionLimits", partial(SessionLimits, auth_seconds=0.01))

    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket:
            assert (await socket.error())["code"] == "invalid_api_key"
            assert (await socket.hear_close())[0] == 1008

    converse(llm, scenario, KEYS)


def test_an_open_server_takes_any_key(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket:
            socket.say(type="auth", key="whatever")
            assert (await socket.hear())["type"] == "authenticated"

    converse(llm, scenario)


def test_a_defect_is_told_without_details(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(answering, "completion_calls", broken)

    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket:
            socket.say(id="a", **prompt())
            error = await socket.error()
            assert error["type"] == "server_error" and "secret" not in error["message"]
            socket.say(type="ping")
            assert (await socket.hear())["type"] == "pong"

    converse(llm, scenario)
    assert "a secret" in caplog.text


def test_pages_of_other_origins_are_turned_away(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        async with scene.socket(Origin="https://elsewhere.example") as socket:
            assert socket.accepted is None and socket.closed is not None
        async with scene.socket(Origin="http://server") as socket:
            assert socket.accepted is not None
        async with scene.socket(Origin="https://friend.example") as socket:
            assert socket.accepted is not None

    converse(llm, scenario, cors_origins=("https://friend.example",))


@pytest.mark.parametrize(
    ("origin", "host", "allowed", "expected"),
    [
        (None, "a:8000", (), True),
        ("http://a:8000", "a:8000", (), True),
        ("http://A:8000", "a:8000", (), True),
        ("http://a:8001", "a:8000", (), False),
        ("http://b", "a", (), False),
        ("http://b", "a", ("*",), True),
        ("http://b", "a", ("http://b",), True),
        ("null", "a", (), False),
        ("http://a.evil", "a", (), False),
        ("http://b", None, (), False),
    ],
)
def test_origins(origin: str | None, host: str | None, allowed: tuple[str, ...], expected: bool) -> None:
    assert is_allowed(origin, host, allowed) is expected
