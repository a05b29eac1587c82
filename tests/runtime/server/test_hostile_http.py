"""What no client of good will sends, on raw sockets: the answer is a 4xx, and the server serves on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.server.idle import check_idle
from tests.runtime.server.running import RunningServer

PATIENCE = 30.0  # seconds
MAX_BODY = 1 << 20  # bytes
BODY_TIMEOUT = 1.0  # seconds
SHORT = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
CHAT = b'{"messages":[{"role":"user","content":"Hello"}],"max_tokens":2%s}'
COMPLETION = b'{"prompt":"Hello","max_tokens":2%s}'


@dataclass(frozen=True)
class Answer:
    """One answer of the server, as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        """The error that the body tells of, in OpenAI's shape."""
        content = json.loads(self.body)
        assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = content["error"]
        assert isinstance(error["message"], str) and error["message"]
        return error


@pytest.fixture(scope="module")
def server(tiny_chat_bundle: Path) -> Iterator[RunningServer]:
    flags = ("--model-path", tiny_chat_bundle, "--port", "0", "--threads", "1", "--max-body-bytes", MAX_BODY)
    with RunningServer(*flags, "--body-timeout", BODY_TIMEOUT) as running:
        running.wait_until_ready()
        yield running
        assert running.stop() == 0
    assert "Traceback" not in running.log, running.log


@pytest.fixture(autouse=True)
def still_serves(server: RunningServer) -> Iterator[None]:
    """After each test the server has given everything back, and answers others."""
    yield
    check_idle(server.url)
    answer = httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=PATIENCE)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(server.address, timeout=PATIENCE)


def received(connection: socket.socket) -> bytes:
    """Everything that comes until the server closes the connection."""
    parts = []
    while True:
        try:
            part = connection.recv(1 << 16)
        except ConnectionResetError:  # it closed while something of ours was still under way
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)


def answers(data: bytes) -> list[Answer]:
    """Take apart what came; every answer here has a length, or is chunked."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status, *_ = first.split(" ")
        assert version == "HTTP/1.1"
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while (size := int((chunk := data.split(b"\r\n", 1))[0], 16)) > 0:
                body, data = body + chunk[1][:size], chunk[1][size + 2 :]
            data = data.partition(b"\r\n\r\n")[2]
        else:
            size = int(headers.get("content-length", 0))
            body, data = data[:size], data[size:]
        found.append(Answer(int(status), headers, body))
    return found


def exchange(server: RunningServer, data: bytes) -> list[Answer]:
    """Send bytes, and return what is answered until the server closes the connection."""
    with connect(server) as connection:
        connection.sendall(data)
        return answers(received(connection))


def post(path: str, body: bytes, *headers: str, content_type: str | None = "application/json") -> bytes:
    """A request after which the connection is closed."""
    lines = [f"POST {path} HTTP/1.1", "Host: server", "Connection: close", f"Content-Length: {len(body)}", *headers]
    if content_type is not None:
        lines.append(f"Content-Type: {content_type}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def refused(server: RunningServer, data: bytes, status: int = 400) -> dict[str, Any]:
    """Send a request that has to be refused, and return the error."""
    [answer] = exchange(server, data)
    assert answer.status == status, (answer.status, answer.body[:300])
    assert answer.headers["content-type"] == "application/json"
    return answer.error()


# Bodies, by what is wrong with them. Each is sent to every path that takes bodies.
BODIES = {
    "nothing": b"",
    "white space": b" \n\t ",
    "an open brace": b"{",
    "a value cut off": b'{"prompt":',
    "a comma too many": b'{"prompt":"a",}',
    "single quotes": b"{'prompt':'a'}",
    "two values": b'{"prompt":"a"}{"prompt":"b"}',
    "no object": b"[1,2,3]",
    "a text": b'"prompt"',
    "null": b"null",
    "a number": b"17",
    "not a number": b'{"prompt":"a","messages":[],"input":"a","temperature":NaN}',
    "infinity": b'{"prompt":"a","messages":[],"input":"a","temperature":-Infinity}',
    "deep lists": b"[" * 10_000 + b"]" * 10_000,
    "deep objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "deep and not closed": b'{"prompt":' + b"[" * 10_000,
    "deep inside a field": b'{"prompt":"a","input":"a","metadata":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "a NUL byte between": b'{"prompt":\x00"a"}',
    "a NUL byte inside": b'{"prompt":"a\x00b"}',
    "only NUL bytes": b"\x00" * 100,
    "bad UTF-8": b'{"prompt":"\xff\xfe"}',
    "UTF-8 cut off": b'{"prompt":"\xe6\x97"}',
    "an overlong form": b'{"prompt":"\xc0\xaf"}',
    "a surrogate in UTF-8": b'{"prompt":"\xed\xa0\xbd"}',
    "UTF-16": '{"prompt":"a"}'.encode("utf-16"),
    "UTF-32": '{"prompt":"a"}'.encode("utf-32"),
    "half a surrogate pair": rb'{"prompt":"\ud83d","input":"\ud83d","messages":[{"role":"user","content":"\ud83d"}]}',
    "a pair in the wrong order": rb'{"prompt":"\ude00\ud83d","input":"\ude00\ud83d","text":"\ude00\ud83d"}',
    "half a pair in a name": rb'{"\udc00":1}',
    "a wrong escape": rb'{"prompt":"\x41"}',
    "compressed": b"\x1f\x8b\x08\x00" + b"\x00" * 40,
}
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_bodies_that_are_no_request(server: RunningServer, body: bytes) -> None:
    for path in PATHS:
        assert refused(server, post(path, body))["type"] == "invalid_request_error", path


NUMBERS = {
    "max_tokens": [b"1e400", b"1" + b"0" * 400, b"-1", b"1.5", b'"2"', b"true", b"9223372036854775808", b"1e2", b"[]"],
    "temperature": [b"1e400", b"-1e400", b"-0.1", b"1" + b"0" * 400, b'"0"', b"{}"],
    "top_p": [b"0", b"1.0000001", b"-1", b"1e400"],
    "n": [b"0", b"-1", b"129", b"1" + b"0" * 400, b"1e400"],
    "seed": [b"1e400", b"1" + b"0" * 400, b"0.5"],
    "logit_bias": [b'{"0":1e400}', b'{"1e400":1}', b'{"-1":1}', b'{"99999":1}', b'{"x":1}', b"[0]"],
    "stop": [b"1", b"[1]", b"{}", b'[""]', b"[" + b",".join([b'"a"'] * 1000) + b"]"],
    "priority": [b"1e400", b"1" + b"0" * 400],
    "stop_token_ids": [b"[1e400]", b"[-1]", b"[" + b"1" * 400 + b"]"],
    "timeout": [b"0", b"-1", b"1e400", b"1" + b"0" * 400],
    "model": [b"1", b"[]", b'"' + b"m" * 5000 + b'"'],
    "stream": [b'"yes"', b"1"],
    "stream_options": [b'{"include_usage":true}', b"1"],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in NUMBERS.items() for value in values], ids=lambda v: v[:20]
)
def test_values_that_do_not_fit(server: RunningServer, field: str, value: bytes) -> None:
    """Far too large, of another type, not a number: for completions and chats alike."""
    for path, whole in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        body = whole % (b',"%s":%s' % (field.encode(), value))
        error = refused(server, post(path, body))
        assert len(error["message"]) < 1000


def test_token_ids_that_are_none(server: RunningServer) -> None:
    for value in (b"1e400", b"1" + b"0" * 400, b"-1", b"1.5", b"320", b"null", b"true", b'1,"a"', b"[]"):
        for path, field in (("/v1/completions", b"prompt"), ("/v1/embeddings", b"input"), ("/detokenize", b"tokens")):
            refused(server, post(path, b'{"%s":[%s]}' % (field, value)))


def test_the_last_of_equal_names_counts(server: RunningServer) -> None:
    [answer] = exchange(server, post("/v1/completions", b'{"prompt":"a","max_tokens":3,"prompt":"b","max_tokens":1}'))
    assert answer.status == 200 and json.loads(answer.body)["usage"]["completion_tokens"] == 1
    refused(server, post("/v1/completions", b'{"prompt":"a","max_tokens":1,"max_tokens":-1}'))


def test_texts_of_every_kind_are_served(server: RunningServer) -> None:
    for text in ("\u0000", "\x7f\x1b[2J", "\u202e\u2066", "\ufeff", "\U0010ffff", "🙂" * 50, "</s><s>", "\\" * 100):
        body = json.dumps({"prompt": text, "max_tokens": 1}).encode()
        [answer] = exchange(server, post("/v1/completions", body))
        assert answer.status == 200, (text, answer.body)


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "application/xml", "multipart/form-data; boundary=x", "a", ""],
)
def test_other_content_types(server: RunningServer, content_type: str) -> None:
    """Only JSON is read, under its name or under none; whoever names something else is told so."""
    form = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nHello\r\n--x--\r\n'
    for body in (form, b"prompt=Hello&max_tokens=2", b"<prompt>Hello</prompt>"):
        refused(server, post("/v1/completions", body, content_type=content_type))
    if content_type:
        error = refused(server, post("/v1/completions", COMPLETION % b"", content_type=content_type))
        assert "Content-Type: application/json" in error["message"]


@pytest.mark.parametrize("content_type", [None, "application/json; charset=utf-8", "application/vnd.api+json"])
def test_content_types_of_json(server: RunningServer, content_type: str | None) -> None:
    [answer] = exchange(server, post("/v1/completions", COMPLETION % b"", content_type=content_type))
    assert answer.status == 200


def test_bodies_beyond_the_limit(server: RunningServer) -> None:
    """With a length in front they are refused at once, in chunks as soon as there are too many."""
    large = b'{"prompt":"' + b"a" * MAX_BODY + b'"}'
    assert refused(server, post("/v1/completions", large), 413)["code"] == "request_too_large"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: server\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(head)
        sent = 0
        try:
            while sent <= 64 * MAX_BODY:
                connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                sent += 0x10000
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 64 * MAX_BODY, "chunks were taken without end"
    # As large as it may be, it is read, and then found too long for the model.
    largest = b'{"prompt":"' + b"a" * (MAX_BODY - 13) + b'"}'
    assert refused(server, post("/v1/completions", largest))["code"] == "context_length_exceeded"


CHUNKS = {
    "no number": b"zz\r\n",
    "a negative size": b"-5\r\nhello\r\n",
    "a huge size": b"FFFFFFFFFFFFFFFFFF\r\nhello\r\n",
    "no line end": b"5\r\nhelloworld\r\n",
}


@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
def test_broken_chunks(server: RunningServer, chunk: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: server\r\nTransfer-Encoding: chunked\r\n\r\n"
    for answer in exchange(server, head + chunk):
        assert 400 <= answer.status < 500


@pytest.mark.parametrize("part", [b"", b"5\r\n", b"5\r\n{", b'11\r\n{"prompt":"aaaaa"\r\n'])
def test_chunks_that_stop_coming(server: RunningServer, part: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: server\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert refused(server, head + part, 408)["code"] == "request_timeout"


BROKEN = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS handshake\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no method": b" / HTTP/1.1\r\nHost: a\r\n\r\n",
    "an unknown method": b"BREW / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    "a version of its own": b"GET / HTTP/9.9\r\nHost: a\r\nConnection: close\r\n\r\n",
    "a header without a name": b"GET / HTTP/1.1\r\n: a\r\n\r\n",
    "a header without a colon": b"GET / HTTP/1.1\r\nHost\r\n\r\n",
    "a NUL byte in a header": b"GET / HTTP/1.1\r\nHost: a\x00b\r\n\r\n",
    "a NUL byte in the path": b"GET /\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
    "a folded header": b"GET / HTTP/1.1\r\nHost: a\r\n b\r\nConnection: close\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 5\r\n\r\n{}",
    "a length and chunks": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a length that is none": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: two\r\n\r\n{}",
    "a length with a sign": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: +2\r\n\r\n{}",
    "an unknown encoding": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n{}",
    "a long path": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "a long header": b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
    "a long name": b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X" * 70_000 + b": a\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * 10_000 + b"\r\n",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_broken_http(server: RunningServer, data: bytes) -> None:
    """A 4xx or a closed connection, and never more than one answer: what follows is no request."""
    found = exchange(server, data)
    assert len(found) <= 1
    for answer in found:
        assert answer.status < 500
        assert answer.status >= 400 or b"folded" in data or answer.headers.get("connection") == "close"


def test_paths_of_every_kind(server: RunningServer) -> None:
    paths = ("/../../etc/passwd", "/assets/../../../etc/passwd", "/assets/%2e%2e/%2e%2e/setup.py", "/%00", "/%ff%fe")
    for path in (*paths, "//", "/v1//models", "/v1/models/%2e%2e%2f", "/v1/models/" + "%41" * 2000, "/health/", "*"):
        [answer] = exchange(server, f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        assert 400 <= answer.status < 500, (path, answer)
        assert b"root:" not in answer.body


def test_slow_senders_are_left(server: RunningServer) -> None:
    """Byte after byte keeps nobody here for longer than the time there is for headers, and again for a body."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
    for whole, trickled in ((b"", head), (head, b" " * 1000)):
        with connect(server) as connection:
            connection.sendall(whole)
            connection.settimeout(BODY_TIMEOUT / 50)
            data = b""
            for index in range(len(trickled)):
                try:
                    connection.sendall(trickled[index : index + 1])
                    data = connection.recv(1 << 16)
                except TimeoutError:
                    continue
                except (ConnectionResetError, BrokenPipeError):
                    pass
                break
            else:
                pytest.fail("everything was waited for")
            assert data == b"" or data.startswith(b"HTTP/1.1 408 ")


def test_many_slow_senders_keep_nobody_from_being_served(server: RunningServer) -> None:
    connections = [connect(server) for _ in range(200)]
    try:
        for index, connection in enumerate(connections):
            parts = (b"", b"POST", b"POST / HTTP/1.1\r\nX: ", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
            connection.sendall(parts[index % 4])
        answer = httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=PATIENCE)
        assert answer.status_code == 200
        for connection in connections:
            assert all(answer.status == 408 for answer in answers(received(connection)))
    finally:
        for connection in connections:
            connection.close()


def test_requests_sent_without_waiting_are_answered_in_order(server: RunningServer) -> None:
    """Good and bad ones; after one that is refused before its body was read, the connection ends."""
    keep = [post("/v1/completions", COMPLETION % b"").replace(b"Connection: close\r\n", b"") for _ in range(3)]
    wrong = post("/v1/completions", b'{"prompt":1}').replace(b"Connection: close\r\n", b"")
    found = exchange(server, keep[0] + wrong + keep[1] + post("/v1/models", b"", content_type=None))
    assert [answer.status for answer in found] == [200, 400, 200, 403]


def test_a_burst_on_one_connection(server: RunningServer) -> None:
    many = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 500 + b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
    found = exchange(server, many)
    assert [answer.status for answer in found] == [200] * 501


def test_clients_that_leave_before_pipelined_answers(server: RunningServer) -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}).encode()
    request = post("/v1/completions", body).replace(b"Connection: close\r\n", b"")
    for _ in range(5):
        with connect(server) as connection:
            connection.sendall(request * 20)


def test_http_1_0(server: RunningServer) -> None:
    body = COMPLETION % b""
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    [answer] = exchange(server, head + body)
    assert answer.status == 200 and json.loads(answer.body)["choices"]
    [answer] = exchange(server, b"GET /health HTTP/1.0\r\n\r\n")
    assert answer.status == 200
    # A version that knows no chunks is given the stream as it is, and its end is the end of the connection.
    body = COMPLETION % b',"stream":true'
    with connect(server) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        data = received(connection)
    assert data.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in data.lower()
    assert data.endswith(b"data: [DONE]\n\n")


def test_half_closed_connections(server: RunningServer) -> None:
    """A client that sends nothing more may still wait for its answer, or be taken for gone; but not be kept."""
    with connect(server) as connection:
        connection.sendall(post("/v1/completions", COMPLETION % b""))
        connection.shutdown(socket.SHUT_WR)
        data = received(connection)
    assert data == b"" or data.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 499 "))
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        connection.shutdown(socket.SHUT_WR)
        assert all(400 <= answer.status < 500 for answer in answers(received(connection)))
    with connect(server) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert received(connection) == b""


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/", "/openapi.json"])
def test_a_get_with_a_body_and_a_head(server: RunningServer, path: str) -> None:
    """A body that nobody asked for is read over: what follows it on the connection is the next request."""
    with_body = f"GET {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\n".encode() + b'{"a": "bcd"}'
    last = f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()
    assert [answer.status for answer in exchange(server, with_body + last)] == [200, 200]
    with connect(server) as connection:
        connection.sendall(f"HEAD {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        head, _, content = received(connection).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] in (b"200", b"405") and content == b""


def test_other_methods(server: RunningServer) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        request = f"{method} /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()
        [answer] = exchange(server, request)
        assert answer.status == 405 and answer.error()["code"] == "method_not_allowed", method
        assert answer.headers["allow"] == "POST"


def test_a_client_that_waits_for_the_go_ahead(server: RunningServer) -> None:
    body = COMPLETION % b""
    with connect(server) as connection:
        connection.sendall(post("/v1/completions", body, "Expect: 100-continue")[: -len(body)])
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        [answer] = answers(received(connection))
    assert answer.status == 200


def test_upgrades_that_are_none(server: RunningServer) -> None:
    """An upgrade to nothing known is a plain request; a WebSocket needs a complete handshake."""
    head = "GET {} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, close\r\nUpgrade: {}\r\n\r\n"
    [answer] = exchange(server, head.format("/health", "h2c").encode())
    assert answer.status == 200
    for path in ("/v1/stream", "/health", "/v1/completions"):
        for answer in exchange(server, head.format(path, "websocket").encode()):
            assert 400 <= answer.status < 500, (path, answer)
