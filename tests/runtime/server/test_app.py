"""The application around the routes, with routes of its own and no model."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.testclient import TestClient
from starlette.types import Message

from inferencex.formats.errors import BackendError, RequestError
from inferencex.runtime.server.app import create_app
from inferencex.runtime.server.config.load import load_settings
from inferencex.runtime.server.errors import TooManyRequests
from inferencex.runtime.server.telemetry.metrics import Metrics

KEY, ADMIN = "a-key-of-a-user", "a-key-of-an-admin"


class Service:
    """As much of a service as the application itself looks at."""

    draining = False
    observers: tuple[Any, ...] = ()


class Body(BaseModel):
    text: str
    count: int = 1


def routes() -> APIRouter:
    router = APIRouter()

    @router.post("/v1/echo")
    async def echo(body: Body, request: Request) -> dict[str, Any]:
        state = request.state
        return {"text": body.text, "caller": state.caller.name, "admin": state.caller.is_admin, "id": state.request_id}

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/v1/fail/{how}")
    async def fail(how: str) -> None:
        errors: dict[str, Exception] = {
            "quota": TooManyRequests("slow down", retry_after=1.2),
            "request": RequestError("cannot be"),
            "backend": BackendError("broken"),
            "defect": ZeroDivisionError("division by zero"),
        }
        raise errors[how]

    @router.get("/v1/stream/{how}")
    async def stream(how: str) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"one"
            if how == "broken":
                raise ZeroDivisionError
            yield b"two"

        return StreamingResponse(pieces())

    return router


def application(service: Any = None, **flags: Any) -> FastAPI:
    given = {f"server.{name}": value for name, value in flags.items()}
    return create_app(service or Service(), load_settings(given, {}).settings, routers=[routes()])


def client(**flags: Any) -> TestClient:
    return TestClient(application(**flags))


def error_of(response: Any) -> dict[str, Any]:
    """Return the error of a response, which has OpenAI's shape and nothing else."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def test_unknown_paths_and_wrong_methods() -> None:
    absent = client().get("/v1/nowhere")
    assert absent.status_code == 404 and error_of(absent)["code"] == "unknown_path"
    wrong = client().get("/v1/echo")
    assert wrong.status_code == 405 and wrong.headers["Allow"] == "POST"
    assert error_of(wrong)["code"] == "method_not_allowed"
    assert client().post("/v1/echo/", json={"text": "a"}).status_code == 404


@pytest.mark.parametrize(
    ("content", "param", "message"),
    [
        (b"{", None, "the body is not JSON"),
        (b"", None, "the body: Field required"),
        (b"[]", None, "the body: "),
        (b'{"text": 5}', "text", "text: Input should be a valid string"),
        (b'{"text": "a", "count": "many"}', "count", "count: Input should be a valid integer"),
        (b'{"count": 1}', "text", "text: Field required"),
        (b'{"text": "a", "count": 1' + b"0" * 5000 + b"}", None, ""),
        (b'{"text": "\xff"}', None, "the body is not UTF-8"),
        (b'{"text": "\\ud83d"}', None, "the body escapes half of a surrogate pair"),
        (b'{"text": ' + b"[" * 100_000, None, "the body is nested deeper than the 64 levels"),
    ],
)
def test_wrong_bodies_are_400(content: bytes, param: str | None, message: str) -> None:
    response = client().post("/v1/echo", content=content, headers={"Content-Type": "application/json"})
    error = error_of(response)
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert error["message"].startswith(message)


@pytest.mark.parametrize(
    ("how", "status", "kind"),
    [
        ("quota", 429, "rate_limit_error"),
        ("request", 400, "invalid_request_error"),
        ("backend", 500, "server_error"),
        ("defect", 500, "server_error"),
    ],
)
def test_errors_of_routes_have_openai_shape(how: str, status: int, kind: str) -> None:
    response = client(cors_origins=["https://a.example"]).get(
        f"/v1/fail/{how}", headers={"X-Request-Id": "mine", "Origin": "https://a.example"}
    )
    assert response.status_code == status and error_of(response)["type"] == kind
    assert response.headers["X-Request-Id"] == "mine"
    assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
    assert response.headers.get("Retry-After") == ("2" if how == "quota" else None)
    assert "division" not in response.text


def test_a_defect_is_logged_with_the_id_of_the_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        response = client().get("/v1/fail/defect")
    request_id = response.headers["X-Request-Id"]
    assert request_id in error_of(response)["message"]
    (record,) = caplog.records
    assert record.fields == {"request_id": request_id} and record.exc_info is not None  # type: ignore[attr-defined]


def test_a_stream_that_breaks_ends_without_an_end() -> None:
    messages = asyncio.run(_ask(application(), "GET", "/v1/stream/broken", []))
    assert messages[-1].get("more_body") is True
    whole = asyncio.run(_ask(application(), "GET", "/v1/stream/whole", []))
    assert whole[-1].get("more_body", False) is False
    assert b"".join(message.get("body", b"") for message in whole) == b"onetwo"


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-123", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("a\tb", False), ("", False)],
)
def test_request_ids(given: str, kept: bool) -> None:
    response = client().post("/v1/echo", json={"text": "a"}, headers={"X-Request-Id": given})
    found = response.headers["X-Request-Id"]
    assert response.json()["id"] == found
    assert (found == given) is kept
    assert kept or found.startswith("req-")


def test_keys() -> None:
    with_keys = client(api_keys=[KEY], admin_keys=[ADMIN])
    missing = with_keys.post("/v1/echo", json={"text": "a"})
    assert missing.status_code == 401 and missing.headers["WWW-Authenticate"] == "Bearer"
    assert error_of(missing)["code"] == "invalid_api_key"
    for path in ("/v1", "/v1/nowhere", "/tokenize", "/detokenize", "/v1/echo/x"):
        assert with_keys.get(path).status_code == 401, path
    for path in ("/v2", "/nowhere"):
        assert with_keys.get(path).status_code == 404, path
    assert with_keys.get("/health").status_code == 200
    for key, name, admin in ((KEY, "key-1", False), (ADMIN, "admin-1", True)):
        response = with_keys.post("/v1/echo", json={"text": "a"}, headers={"Authorization": f"Bearer {key}"})
        assert (response.json()["caller"], response.json()["admin"]) == (name, admin)
    wrong = with_keys.post("/v1/echo", json={"text": "a"}, headers={"Authorization": f"Bearer {KEY}x"})
    assert wrong.status_code == 401 and KEY not in wrong.text


def test_without_keys_everyone_is_anonymous() -> None:
    response = client().post("/v1/echo", json={"text": "a"}, headers={"Authorization": "Bearer anything"})
    assert response.json()["caller"] == "anonymous"


def test_more_can_be_protected() -> None:
    protected = client(api_keys=[KEY], protect=["health", "docs"])
    for path in ("/health", "/ready", "/docs", "/openapi.json"):
        assert protected.get(path).status_code == 401, path
    assert protected.get("/health", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


def test_large_bodies() -> None:
    small = client(max_body_bytes="100")
    assert small.post("/v1/echo", json={"text": "a" * 50}).status_code == 200
    large = small.post("/v1/echo", json={"text": "a" * 100})
    assert large.status_code == 413 and error_of(large)["code"] == "request_too_large"
    assert large.headers["Connection"] == "close"


def test_large_bodies_without_a_length() -> None:
    pieces: list[Message] = [{"type": "http.request", "body": b"a" * 60, "more_body": True}] * 3
    messages = asyncio.run(_ask(application(max_body_bytes="100"), "POST", "/v1/echo", pieces))
    assert messages[0]["status"] == 413


def test_slow_bodies() -> None:
    pieces: list[Message] = [{"type": "http.request", "body": b"{", "more_body": True}]
    messages = asyncio.run(_ask(application(body_timeout="0.01"), "POST", "/v1/echo", pieces))
    assert messages[0]["status"] == 408
    assert json.loads(messages[1]["body"])["error"]["code"] == "request_timeout"


def test_a_client_that_leaves_before_the_end_of_its_body_reaches_no_route() -> None:
    pieces: list[Message] = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    assert asyncio.run(_ask(application(), "POST", "/v1/echo", pieces)) == []


def test_a_client_that_does_not_read_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def never(message: Message) -> None:
        await asyncio.Event().wait()

    with caplog.at_level(logging.INFO):
        asyncio.run(_ask(application(send_timeout="0.01"), "GET", "/v1/stream/whole", [], send=never))
    assert "nothing was read for 0.01 s" in caplog.text


def test_no_foreign_page_may_call_unless_it_is_listed() -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in client().options("/v1/echo", headers=preflight).headers
    listed = client(cors_origins=["https://a.example"], api_keys=[KEY])
    answer = listed.options("/v1/echo", headers=preflight)
    assert answer.status_code == 200 and answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
    other = listed.options("/v1/echo", headers={**preflight, "Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


def test_security_headers() -> None:
    answer = client().get("/docs")
    assert answer.status_code == 200 and "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert client().get("/v1/nowhere").headers["X-Content-Type-Options"] == "nosniff"


def test_connections_are_closed_while_the_server_drains() -> None:
    service = Service()
    draining = TestClient(application(service))
    assert draining.get("/health").headers.get("Connection") != "close"
    service.draining = True
    assert draining.get("/health").headers["Connection"] == "close"


def test_the_access_log_names_caller_and_status_and_no_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="inferencex.http"):
        logged = client(api_keys=[KEY])
        logged.post("/v1/echo", json={"text": "a"}, headers={"Authorization": f"Bearer {KEY}", "X-Request-Id": "me"})
        logged.post("/v1/echo", json={"text": "a"})
        logged.get("/health")
    first, second = [record.fields for record in caplog.records if record.name == "inferencex.http"]  # type: ignore[attr-defined]
    assert (first["caller"], first["status"], first["path"], first["request_id"]) == ("key-1", 200, "/v1/echo", "me")
    assert (second["caller"], second["status"]) == (None, 401)
    assert KEY not in caplog.text and KEY not in str(first)


def test_requests_are_counted_by_route_and_not_by_what_clients_write() -> None:
    service, metrics = Service(), Metrics()
    service.observers = (metrics,)
    counted = TestClient(application(service))
    for path in ("/v1/fail/quota", "/v1/fail/request", "/v1/no/such/path"):
        counted.get(path)
    text = metrics.render().decode()
    assert 'path="/v1/fail/{how}"' in text and 'path="unknown"' in text
    assert "/v1/no/such" not in text and "/v1/fail/quota" not in text


def test_the_description_says_what_the_server_does() -> None:
    document = client(api_keys=[KEY]).get("/openapi.json").json()
    echo = document["paths"]["/v1/echo"]["post"]
    assert "422" not in echo["responses"] and {"4XX", "5XX"} <= set(echo["responses"])
    assert echo["security"] == [{"key": []}] and "security" not in document["paths"]["/health"]["get"]
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert client(docs=False).get("/openapi.json").status_code == 404


async def _ask(app: FastAPI, method: str, path: str, pieces: list[Message], send: Any = None) -> list[Message]:
    """Speak ASGI to the application; nothing more comes after the pieces."""
    sent: list[Message] = []
    waiting = list(pieces)

    async def receive() -> Message:
        if waiting:
            return waiting.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def collect(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await app(scope, receive, send or collect)
    return sent
