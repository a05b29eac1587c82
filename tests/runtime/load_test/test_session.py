"""The whole command against a scripted server: what it prints and what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from inferencex.cli.console import exit_status
from inferencex.runtime.load_test.cli import app
from tests.runtime.load_test.fake_server import FakeServer, Reply, failed, plain

Serve = Callable[..., FakeServer]


def bench(server: FakeServer, *options: str) -> int:
    return exit_status(app, "inferencex bench", ["serve", "--url", server.url, "--seed", "1", *options])


def test_a_sweep_prints_and_writes_everything(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve()
    results, plot = tmp_path / "results.json", tmp_path / "plot.svg"
    options = ("--concurrency", "1,4", "--requests", "8", "--prompt-length", "uniform:5:9", "--output-length", "6")
    files = ("--output", str(results), "--plot", str(plot))
    assert bench(server, *options, "--ignore-eos", "--slo", "ttft:60s", *files) == 0
    printed = capsys.readouterr().out
    for said in (
        *(
            "time to first token",
            "inter-token latency",
            "time per output token",
            "end to end",
            "p50",
            "p90",
            "p95",
            "p99",
        ),
        *("8 of 8 requests completed", "output tokens/s", "goodput", "100.0% of all", "Sweep", "µs an output token"),
    ):
        assert said in printed, said
    found = json.loads(results.read_text())
    assert (found["model"], found["seed"], found["ignore_eos"], found["stream"]) == ("tiny", 1, True, True)
    first, second = found["measurements"]
    assert [each["load"] for each in (first, second)] == [
        {"rate": None, "concurrency": 1},
        {"rate": None, "concurrency": 4},
    ]
    assert first["completed"] == 8 and first["output_tokens"] == 48 and first["errors"] == {}
    assert first["time_to_first_token"]["count"] == 8 and first["inter_token_latency"]["count"] == 40
    assert len(second["records"]) == 8
    assert all(5 <= record["prompt_tokens"] <= 9 and record["events"] == 6 for record in second["records"])
    assert len({tuple(body["prompt"][:4]) for body in server.bodies}) == len(server.bodies) == 18
    assert all(body["ignore_eos"] for body in server.bodies)
    drawn = ElementTree.parse(plot).getroot()
    assert sum(element.tag.endswith("circle") for element in drawn.iter()) == 3 * 2 * 2
    assert "4 at a time" in plot.read_text()


def test_not_streamed(serve: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    server = serve()
    plot = tmp_path / "plot.svg"
    assert bench(server, "--no-stream", "--requests", "3", "--warm-up", "0", "--plot", str(plot)) == 0
    printed = capsys.readouterr().out
    assert "end to end" in printed and "time to first token" not in printed
    assert len(server.bodies) == 3 and not any("stream_options" in body for body in server.bodies)
    ElementTree.parse(plot)


def test_a_chat_of_texts_of_exact_lengths(serve: Serve) -> None:
    server = serve()
    options = ("--endpoint", "chat", "--prompt-length", "20", "--output-length", "4", "--requests", "3")
    assert bench(server, *options, "--api-key", "key", "--extra", '{"top_k": 7}') == 0
    assert {len(body["messages"][0]["content"].split()) for body in server.bodies} == {20}
    assert all(body["top_k"] == 7 for body in server.bodies)
    assert {headers["authorization"] for headers in server.headers} == {"Bearer key"}


def test_at_a_rate(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(serve(), "--rate", "500", "--requests", "5", "--output-length", "2") == 0
    assert "500 requests/s: latencies in ms" in capsys.readouterr().out


def test_prompts_of_a_file(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one two", "max_tokens": 2}\n{"prompt": [4, 5, 6]}\n')
    server = serve(tokenizes=False)
    assert bench(server, "--prompts", str(file), "--requests", "3", "--warm-up", "0", "--output-length", "9") == 0
    asked = [(body["prompt"], body["max_tokens"]) for body in server.bodies]
    assert asked == [("one two", 2), ([4, 5, 6], 9), ("one two", 2)]
    assert "has 2 prompts" in capsys.readouterr().err


def test_prompts_cut_from_a_text(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text(" ".join(f"word{place}" for place in range(100)))
    server = serve()
    assert bench(server, "--prompts", str(file), "--requests", "4", "--prompt-length", "10") == 0
    for body in server.bodies:
        first = body["prompt"][0]
        assert body["prompt"] == [*range(first, first + 10)], "tokens as they stand in the text"


def test_some_failures_are_counted_and_all_are_a_failure(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    def sometimes(body: dict[str, Any]) -> Reply:
        return failed(429, "too many requests") if body["prompt"][0] % 2 else plain(body)

    assert bench(serve(answer=sometimes), "--requests", "40", "--warm-up", "0", "--concurrency", "4") == 0
    assert "failed, http 429: " in capsys.readouterr().out
    broken = serve(answer=lambda body: failed(500, "it broke"))
    assert bench(broken, "--requests", "3", "--warm-up", "0") == 1
    assert "failed, http 500: 3 (it broke)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"models": ("a", "b")}, "has the models a, b; name one by --model"),
        ({"models": ()}, "has the models (none)"),
        ({"tokenizes": False}, "no /tokenize"),
        ({"answer": lambda body: failed(400, "max_tokens is too large")}, "max_tokens is too large"),
    ],
)
def test_what_the_server_lacks_is_one_line(
    serve: Serve, options: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(serve(**options)) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err
    assert captured.err.splitlines()[-1].startswith("error: ")


def test_a_file_that_cannot_be_written_is_one_line(serve: Serve, tmp_path: Path) -> None:
    assert bench(serve(), "--requests", "1", "--output", str(tmp_path)) == 1


def test_a_tokenizer_file_does_without_the_server(serve: Serve, text_bundle: Path) -> None:
    server = serve(tokenizes=False)
    assert bench(server, "--tokenizer", str(text_bundle), "--requests", "2", "--prompt-length", "12") == 0
    assert {len(body["prompt"]) for body in server.bodies} == {12}
