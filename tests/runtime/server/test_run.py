"""The command from its start to its end, as a process."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.server.running import RunningServer

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 8}
# Loading waits until a file is there, so that a test sees the server before its models.
WAIT_FOR_FILE = """
import pathlib, time
from inferencex.runtime.server.models import loading
load = loading.LLM
def wait(*arguments, **options):
    while not pathlib.Path({path!r}).exists():
        time.sleep(0.01)
    return load(*arguments, **options)
loading.LLM = wait
"""
# Each step takes a while, so that a test meets requests that are under way.
SLOW_STEPS = """
import time
from inferencex.runtime.engine.engine import Engine
step = Engine.step
def slow(self):
    time.sleep({seconds})
    return step(self)
Engine.step = slow
"""


@pytest.fixture(scope="module")
def server(stories_bundle: Path) -> Iterator[RunningServer]:
    with RunningServer(
        "--model-path", stories_bundle, "--port", "0", "--threads", "1", "--body-timeout", "1"
    ) as running:
        running.wait_until_ready()
        yield running


def complete(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={**SHORT, **fields}, timeout=60)


def test_what_is_said_at_the_start(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    answer = complete(server.url)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
    for expected in ("backend cpu", "planned memory", "KV cache of", "full-length requests at once", "no key needed"):
        assert expected in server.log
    assert server.log.index("listening on") < server.log.index("ready after")


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (b"GARBAGE\r\n\r\n", 400, None),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * 300 + b"\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: ", 408, "request_timeout"),
        (b"", 408, "request_timeout"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n{", 408, "request_timeout"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n", 413, "request_too_large"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400, None),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" + b"100000\r\n" + b" " * 0x100000 + b"\r\n" * 1,
            408,
            "request_timeout",
        ),
    ],
    ids=[
        "garbage",
        "long-header",
        "many-headers",
        "slow-header",
        "nothing",
        "slow-body",
        "huge",
        "negative",
        "endless",
    ],
)
def test_hostile_senders_are_answered_and_the_server_still_serves(
    server: RunningServer, request_bytes: bytes, status: int, code: str | None
) -> None:
    with socket.create_connection(server.address, timeout=30) as connection:
        connection.sendall(request_bytes)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:300]
    assert json.loads(content)["error"]["code"] == code
    assert complete(server.url).status_code == 200


def test_health_is_answered_while_a_model_loads(stories_bundle: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    prelude = WAIT_FOR_FILE.format(path=str(go))
    with RunningServer("--model-path", stories_bundle, "--port", "0", "--threads", "1", prelude=prelude) as loading:
        assert httpx.get(f"{loading.url}/health").status_code == 200
        ready = httpx.get(f"{loading.url}/ready")
        assert ready.status_code == 503 and "loading" in ready.text
        refused = complete(loading.url)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_ready"
        go.touch()
        assert complete(loading.wait_until_ready()).status_code == 200
        assert loading.stop() == 0


def test_a_signal_under_load_loses_no_request(stories_bundle: Path) -> None:
    """Every request that reaches the server is answered: in full, or with a clean 503."""
    flags = ("--model-path", stories_bundle, "--port", "0", "--threads", "1", "--max-num-seqs", "8")
    with RunningServer(*flags, prelude=SLOW_STEPS.format(seconds=0.005)) as stopping, ThreadPoolExecutor(16) as clients:
        url = stopping.wait_until_ready()

        def ask(_: int) -> list[httpx.Response]:
            answers = []
            with httpx.Client(timeout=60) as client:
                while True:
                    try:
                        answers.append(client.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 32}))
                    except httpx.ConnectError:  # it listens no more
                        return answers

        asking = [clients.submit(ask, number) for number in range(16)]
        stopping.wait_for(r"method=POST .* status=200")
        stopping.send(signal.SIGTERM)
        answers = [answer for future in asking for answer in future.result()]
        assert stopping.wait() == 0
    statuses = {answer.status_code for answer in answers}
    assert statuses == {200, 503}
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["usage"]["completion_tokens"] == 32
        else:
            assert answer.json()["error"]["code"] == "shutting_down" and int(answer.headers["Retry-After"]) >= 1
    assert "stopped" in stopping.lines[-1]


def test_what_does_not_finish_in_time_is_ended_and_told_so(stories_bundle: Path) -> None:
    flags = ("--model-path", stories_bundle, "--port", "0", "--threads", "1", "--drain-timeout", "0.1")
    with RunningServer(*flags, prelude=SLOW_STEPS.format(seconds=0.05)) as stopping, ThreadPoolExecutor(2) as clients:
        url = stopping.wait_until_ready()
        whole = clients.submit(complete, url, **LONG)
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            first = next(line for line in lines if line.startswith("data: "))
            assert "choices" in json.loads(first.removeprefix("data: "))
            stopping.send(signal.SIGTERM)
            data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        errors = [json.loads(text)["error"] for text in data if '"error"' in text]
        assert [error["code"] for error in errors] == ["shutting_down"]
        answer = whole.result()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
        assert stopping.wait() == 0


def test_a_second_signal_ends_it_at_once(stories_bundle: Path) -> None:
    flags = ("--model-path", stories_bundle, "--port", "0", "--threads", "1")
    with RunningServer(*flags, prelude=SLOW_STEPS.format(seconds=0.05)) as stopping:
        url = stopping.wait_until_ready()
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as stream:
            next(stream.iter_lines())
            stopping.send(signal.SIGTERM)
            stopping.wait_for("told to stop: 1 requests are under way")
            stopping.send(signal.SIGINT)
            assert stopping.wait() == 128 + signal.SIGINT


def test_a_signal_while_loading_ends_it(stories_bundle: Path, tmp_path: Path) -> None:
    prelude = WAIT_FOR_FILE.format(path=str(tmp_path / "never"))
    with RunningServer("--model-path", stories_bundle, "--port", "0", prelude=prelude) as loading:
        assert loading.url
        assert loading.stop() == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "there is nothing to serve; give --model-path, or --model-root"),
        (("--model-path", "{tmp}/absent"), "absent: is not a folder"),
        (("--model-path", "{tmp}"), "bundle.json"),
        (("--model-root", "{tmp}/absent"), "model.root {tmp}/absent: is not a folder"),
        (("--model-path", "{bundle}", "--tensor-parallel-size", "3"), "possible sizes are 1, 2, 4"),
        (("--model-path", "{bundle}", "--model-path", "{bundle}"), "two bundles would be called 'stories'"),
        (("--model-path", "{bundle}", "--port", "{port}"), "cannot listen on 127.0.0.1 port {port}"),
        (("--model-path", "{bundle}", "--host", "no such host"), "server.host 'no such host' is no address"),
        (
            ("--model-path", "{bundle}", "--tls-certificate", "{tmp}/a", "--tls-key", "{tmp}/b"),
            "tls_certificate {tmp}/a",
        ),
        (("--model-path", "{bundle}", "--tls-certificate", "{file}", "--tls-key", "{file}"), "tls_certificate {file}"),
        (("--model-path", "{bundle}", "--filter", "absent"), "there is no filter 'absent'"),
        (("--model-path", "{bundle}", "--grpc-port", "{port}"), "gRPC cannot listen on 127.0.0.1:{port}"),
        (("--model-path", "{bundle}", "--max-model-len", "999999"), "999999"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    stories_bundle: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    (tmp_path / "file").write_text("no certificate")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {
            "tmp": tmp_path,
            "file": tmp_path / "file",
            "bundle": stories_bundle,
            "port": taken.getsockname()[1],
        }
        given = [flag.format(**names) for flag in flags]
        with RunningServer(*given, *([] if "--port" in given else ["--port", "0"])) as failing:
            assert failing.wait() == 1
    errors = [line for line in failing.lines if line.startswith("error: ")]
    assert len(errors) == 1 and message.format(**names) in errors[0]
    assert "Traceback" not in failing.log


def test_the_filter_of_the_examples(stories_bundle: Path) -> None:
    """It refuses prompts and answers, streamed ones too, and leaves others alone."""
    flags = ("--model-path", stories_bundle, "--port", "0", "--threads", "1", "--filter", "word_filter:Words")
    prelude = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})"
    with RunningServer(*flags, prelude=prelude, env={"WORDS": "dragon, Lily"}) as filtering:
        url = filtering.wait_until_ready()
        assert complete(url, max_tokens=3).status_code == 200
        prompt = complete(url, prompt="The Dragon said")
        assert prompt.status_code == 400 and prompt.json()["error"]["code"] == "content_filter"
        assert "'Dragon'" in prompt.json()["error"]["message"]
        answer = complete(url, max_tokens=60)
        assert answer.status_code == 400 and "'Lily'" in answer.json()["error"]["message"]
        streamed = complete(url, max_tokens=60, stream=True).text
        assert "content_filter" in streamed and "Lily" not in streamed.partition('"error"')[0]
        assert httpx.get(f"{url}/v1/status").json()["requests_in_flight"] == 0


def test_all_protocols_in_one_process_behind_a_proxy(stories_bundle: Path) -> None:
    flags = ("--model-path", stories_bundle, "--port", "0", "--threads", "1", "--grpc-port", "0")
    with RunningServer(*flags, "--trusted-proxy", "127.0.0.1", "--replicas", "2") as running:
        url = running.wait_until_ready()
        grpc_port = int(running.wait_for(r"gRPC listens on 127.0.0.1:(\d+)")[1])
        with socket.create_connection(("127.0.0.1", grpc_port), timeout=30):
            pass
        assert "in each of 2 replicas" in running.log
        httpx.get(f"{url}/v1/models", headers={"X-Forwarded-For": "203.0.113.9"})
        running.wait_for("path=/v1/models .*client=203.0.113.9")
        assert running.stop() == 0


def test_a_unix_socket(stories_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    for _ in range(2):  # the second start finds what the first left, if anything
        with RunningServer("--model-path", stories_bundle, "--uds", path, "--threads", "1") as running:
            running.wait_for("ready after .* on unix:")
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
                assert client.get("/ready").status_code == 200
            with RunningServer("--model-path", stories_bundle, "--uds", path) as second:
                assert second.wait() == 1 and "another server does" in second.log
            assert running.stop() == 0
        assert not path.exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate, and is not installed")
def test_tls(stories_bundle: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    flags = ("--model-path", stories_bundle, "--port", "0", "--tls-certificate", certificate, "--tls-key", key)
    with RunningServer(*flags, "--threads", "1") as running:
        url = running.wait_until_ready()
        assert url.startswith("https://")
        trusted = ssl.create_default_context(cafile=certificate)
        assert httpx.get(f"{url}/ready", verify=trusted).status_code == 200
        assert running.stop() == 0


def test_keys_from_the_file_are_asked_for_and_never_logged(stories_bundle: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {{path: {stories_bundle}, served_model_name: [tale, story]}}\nserver: {{port: 0}}\n")
    env = {"INFERENCEX_CONFIG": str(config), "INFERENCEX_SERVER__API_KEYS": "a-very-secret-key"}
    with RunningServer("--threads", "1", "--log-format", "json", env=env) as running:
        running.wait_for("ready after .*1 keys")
        url = running.url
        assert complete(url).status_code == 401
        for model in ("tale", "story"):
            body = {**SHORT, "model": model}
            headers = {"Authorization": "Bearer a-very-secret-key"}
            assert httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
        assert running.stop() == 0
    assert all(isinstance(json.loads(line), dict) for line in running.lines)
    assert "a-very-secret-key" not in running.log
