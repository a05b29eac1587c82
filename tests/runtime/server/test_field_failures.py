"""Failures that servers of this kind were reported for, each asked of the whole server over HTTP."""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferencex.runtime import LLM, SamplingParams
from tests.runtime.server.idle import check_idle
from tests.runtime.server.running import RunningServer
from tests.soak.health import Prober

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SEATS, QUEUE = 4, 12
BLOCK = 16  # tokens of a KV block
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
PROMPTS = ("Once upon a time", "Water boils at", "isn't it?", "東京は", "1234", "Größe, naïve", "the rain", "\n\n  ")


class Client:
    """Asks one server, and keeps connections for it."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self._http = httpx.Client(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None))

    def post(self, path: str, body: Any) -> httpx.Response:
        return self._http.post(path, json=body)

    def ask(self, path: str, **body: Any) -> Any:
        """Return the answer."""
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self, prompt: Any, **body: Any) -> str:
        """Return the only continuation of a prompt."""
        [choice] = self.ask(COMPLETIONS, prompt=prompt, **body)["choices"]
        return str(choice["text"])

    def events(self, path: str, **body: Any) -> list[Any]:
        """Return the events of a stream, which has to be whole."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        frames = answer.text.split("\n\n")
        assert frames.pop() == "" and frames.pop() == "data: [DONE]"
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]

    def deltas(self, prompt: Any, **body: Any) -> list[str]:
        """Return the texts of a streamed continuation, in the pieces they came in."""
        return [event["choices"][0]["text"] for event in self.events(COMPLETIONS, prompt=prompt, **body)]

    def error(self, path: str, body: Any, status: int) -> dict[str, Any]:
        """Send what is refused, and return the error."""
        answer = self.post(path, body)
        assert answer.status_code == status, answer.text
        [(name, error)] = answer.json().items()
        assert name == "error" and set(error) == {"message", "type", "param", "code"}
        found: dict[str, Any] = error
        return found


@pytest.fixture(scope="module")
def server(tiny_chat_bundle: Path) -> Iterator[RunningServer]:
    flags = ("--model-path", tiny_chat_bundle, "--port", "0", "--threads", "1", "--no-access-log")
    with RunningServer(*flags, "--max-num-seqs", SEATS, "--max-queue", QUEUE, "--block-size", BLOCK) as running:
        running.wait_until_ready()
        yield running
        assert running.stop() == 0
    assert "Traceback" not in running.log, running.log


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    yield Client(server)
    check_idle(server.url)


@pytest.fixture(scope="module")
def llm(tiny_chat_bundle: Path) -> LLM:
    """The same model without a server, and without a prefix cache."""
    return LLM(tiny_chat_bundle, threads=1, num_kv_blocks=256, enable_prefix_caching=False)


def ids(seed: int, length: int) -> list[int]:
    """A prompt that shares nothing with that of another seed."""
    return random.Random(seed).choices(range(3, 300), k=length)


def test_15_the_prefix_cache_does_not_change_answers(client: Client, llm: LLM) -> None:
    """A miss, then hits of a whole prompt, up to a block's border, and up to the middle of a block."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def answered(prompt: list[int]) -> int:
        """Check the answer to a prompt, and return how many of its tokens the cache had."""
        body = {**GREEDY, "prompt": prompt, "max_tokens": 12, "return_token_ids": True}
        found = client.ask(COMPLETIONS, **body)
        assert found["choices"][0]["token_ids"] == list(llm.generate([prompt], params)[0].outputs[0].token_ids)
        return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

    for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 5):
        prompt = ids(length, length)
        assert answered(prompt) == 0
        assert (answered(prompt) > 0) == (length > BLOCK)
        for kept in {length, length // BLOCK * BLOCK, length - 3} - {-2, -1, 0}:
            cached = answered([*prompt[:kept], *ids(1000 + length, 10)])
            assert cached <= kept and (cached > 0) == (kept >= BLOCK)


def test_16_no_delta_ends_inside_a_character(client: Client) -> None:
    """Characters of several tokens each, demanded by a pattern; and whatever bytes the model makes up."""
    form = {"guided_regex": "[🙂日é🚀]{12}", "max_tokens": 80, "seed": 3}
    pieces = client.deltas("Once", **form)
    assert "".join(pieces) == client.text("Once", **form)
    assert len("".join(pieces)) == 12 and len([piece for piece in pieces if piece]) > 3
    assert all("\ufffd" not in piece for piece in pieces)
    for seed in range(8):
        free = {"max_tokens": 40, "seed": seed, "ignore_eos": True}
        assert "".join(client.deltas("東京", **free)) == client.text("東京", **free)


def test_17_stop_texts_across_tokens(client: Client) -> None:
    """Texts end before a stop, wherever tokens end; what might have become one is not lost; nothing of one leaks."""
    form = {"guided_regex": "[a-z ]{40}", "max_tokens": 60, "temperature": 0}
    whole = client.text("Water", **form)
    assert len(whole) == 40
    for size in (1, 2, 3, 7):
        for place in (0, 1, 5, 17, 40 - size):
            stop = whole[place : place + size]
            expected = whole[: whole.index(stop)]
            [choice] = client.ask(COMPLETIONS, prompt="Water", **form, stop=[stop])["choices"]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
            assert "".join(client.deltas("Water", **form, stop=stop)) == expected
            kept = {"stop": stop, "include_stop_str_in_output": True}
            assert client.text("Water", **form, **kept) == expected + stop
            assert "".join(client.deltas("Water", **form, **kept)) == expected + stop
    # Of several, the one that is complete first counts, also where one is the beginning or the end of another.
    first, longer, ending = whole[4:7], whole[4:12], whole[6:7]
    for stops in ([longer, first], [first, ending], [longer, ending], ["never#", longer]):
        expected = whole[: min((whole.index(s) + len(s), whole.index(s)) for s in stops if s in whole)[1]]
        assert client.text("Water", **form, stop=stops) == expected
        assert "".join(client.deltas("Water", **form, stop=stops)) == expected
    # Beginnings of stops that are never completed, at the very end too.
    almost = [whole[size:20] + "#" for size in range(1, 20, 4)] + [whole[-3:] + "#"]
    assert client.text("Water", **form, stop=almost) == whole == "".join(client.deltas("Water", **form, stop=almost))


def test_18_seeds(client: Client) -> None:
    """A seeded answer does not depend on its company; without a seed answers differ; several answers are different."""
    seeded = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0, "seed": 11}
    alone = client.text("Once upon a time", **seeded)
    with ThreadPoolExecutor(SEATS) as others:
        noise = [others.submit(client.text, prompt, max_tokens=40, temperature=1.0) for prompt in PROMPTS]
        assert [client.text("Once upon a time", **seeded) for _ in range(4)] == [alone] * 4
        for each in noise:
            each.result()
    free = {**seeded, "seed": None}
    assert len({client.text("Once upon a time", **free) for _ in range(4)}) == 4
    several = [
        [choice["text"] for choice in client.ask(path, **body, **seeded, n=4)["choices"]]
        if path == COMPLETIONS
        else [choice["message"]["content"] for choice in client.ask(path, **body, **seeded, n=4)["choices"]]
        for path, body in (
            (COMPLETIONS, {"prompt": "Once upon a time"}),
            (CHATS, {"messages": [{"role": "user", "content": "Once"}]}),
        )
        for _ in range(2)
    ]
    assert several[0] == several[1] and several[2] == several[3]
    assert all(len(set(texts)) == 4 for texts in several)


def test_19_greedy_answers_do_not_depend_on_the_batch(client: Client) -> None:
    alone = [client.text(prompt, **GREEDY) for prompt in PROMPTS]
    together = [choice["text"] for choice in client.ask(COMPLETIONS, prompt=list(PROMPTS), **GREEDY)["choices"]]
    assert together == alone
    with ThreadPoolExecutor(SEATS * 2) as clients:
        assert list(clients.map(lambda prompt: client.text(prompt, **GREEDY), PROMPTS * 3)) == alone * 3


def test_20_clients_that_leave_hold_nothing(client: Client) -> None:
    """200 of them, with and without streams, at random points: before, during and after their answer."""
    chance = random.Random(20)
    sizes = [chance.randrange(2000) for _ in range(200)]

    def leave(number: int) -> None:
        stream = number % 2 == 0
        body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": stream, "n": 1 + number % 3}
        content = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
        with socket.create_connection(client.server.address, timeout=60) as connection:
            # A reset rather than a polite end, for half of them.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", number % 4 < 2, 0))
            request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
            connection.sendall(request[: len(request) - (5 if number % 7 == 0 else 0)])
            wanted = sizes[number] if stream and number % 7 else 0
            while wanted > 0 and (part := connection.recv(min(wanted, 512))):
                wanted -= len(part)

    with ThreadPoolExecutor(SEATS * 2) as clients:
        list(clients.map(leave, range(200)))
    check_idle(client.server.url)
    assert client.text("Once upon a time", **GREEDY)


def test_21_a_burst_is_queued_or_refused(client: Client) -> None:
    """Ten times as many as there is room for; whether the server is alive is answered all the time."""
    # Long enough that clients which are slow to come meet a full queue too.
    body = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True}
    host, port = client.server.address
    with (
        Prober(host, port, client.server.pid) as prober,
        ThreadPoolExecutor(10 * (SEATS + QUEUE)) as clients,
    ):
        answers = list(clients.map(lambda _: client.post(COMPLETIONS, body), range(10 * (SEATS + QUEUE))))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= SEATS + QUEUE
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["usage"]["completion_tokens"] == 300
        else:
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
    assert prober.health.failures == 0 and prober.health.slowest_own < 1.0


def test_22_no_limit_and_limits_beyond_the_context(client: Client) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "Once"}),
        (CHATS, {"messages": [{"role": "user", "content": "Once"}], "stop": ["e"]}),
    ):
        left_out, null = (client.ask(path, **body, seed=1, **given) for given in ({}, {"max_tokens": None}))
        assert left_out["choices"] == null["choices"]
        for field in ("temperature", "top_p", "n", "stop", "logit_bias", "seed", "stream", "logprobs", "user"):
            client.ask(path, **{"max_tokens": 2, **body, field: None})
        error = client.error(path, {**body, "max_tokens": 5000}, 400)
        assert error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"
        assert "5000" in error["message"] and "1024" in error["message"]
    error = client.error(COMPLETIONS, {"prompt": ids(1, 1500), "max_tokens": 1}, 400)
    assert "1500" in error["message"] and "1024" in error["message"]
    # Exactly what fits is served.
    found = client.ask(COMPLETIONS, prompt=ids(1, 1000), max_tokens=24, ignore_eos=True)
    assert found["usage"]["total_tokens"] == 1024


def test_23_logprobs(client: Client) -> None:
    """0 means the chosen token alone; the offsets cut the text, echoed or not, into its tokens."""
    form = {"guided_regex": "[a-z ]{30}", "max_tokens": 40, "temperature": 0}
    for count in (0, 1, 5):
        for echo in (False, True):
            body = {"prompt": "Water boils, isn't it?", **form, "logprobs": count, "echo": echo}
            [choice] = client.ask(COMPLETIONS, **body)["choices"]
            found = choice["logprobs"]
            cuts = [*found["text_offset"], len(choice["text"])]
            pieces = [choice["text"][begin:end] for begin, end in pairwise(cuts)]
            assert "".join(pieces) == choice["text"]
            special = [piece.startswith("</s>") or piece.startswith("<s>") for piece in found["tokens"]]
            assert all(a == b or s for a, b, s in zip(pieces, found["tokens"], special, strict=True))
            for token, logprob, top in zip(
                found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
            ):
                if logprob is None:
                    assert top is None and echo
                else:
                    assert max(1, count) <= len(top) <= count + 1 and top[token] == logprob
    messages = [{"role": "user", "content": "Water"}]
    for count in (0, 3):
        answer = client.ask(CHATS, messages=messages, **form, logprobs=True, top_logprobs=count)
        [choice] = answer["choices"]
        content = choice["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"]
        assert all(len(entry["top_logprobs"]) == count for entry in content)
        spelled = b"".join(bytes(entry["bytes"]) for entry in content).decode()
        assert spelled.removesuffix("</s>") == choice["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        (CHATS, {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_24_mistakes_are_never_500(client: Client, path: str, body: dict[str, Any]) -> None:
    error = client.error(path, {**body, "model": "nobody"}, 404)
    assert error["code"] == "model_not_found" and error["type"] == "not_found_error" and "nobody" in error["message"]
    [field] = body
    for wrong in (None, 1, 1.5, True, {}, [], [None], [[]], [{}], {"a": "b"}, [1.5], [["a"]], [[1], "a"]):
        if wrong == [] and path == "/detokenize":  # no tokens are no text
            continue
        error = client.error(path, {field: wrong}, 400)
        assert error["type"] == "invalid_request_error", wrong
    client.error(path, {}, 400)
    assert "unknwon" in client.error(path, {**body, "unknwon": 1}, 400)["message"]
    for text in ("", "{", "nul", '{"a":1,}', '{"a"}', "<xml/>"):
        answer = httpx.post(
            f"{client.server.url}{path}", content=text, headers={"Content-Type": "application/json"}, timeout=60
        )
        assert answer.status_code == 400 and set(answer.json()) == {"error"}
    for method in ("GET", "DELETE"):
        answer = httpx.request(method, f"{client.server.url}{path}", timeout=60)
        assert answer.status_code == 405 and set(answer.json()) == {"error"}
