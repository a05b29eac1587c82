"""Options: what they mean together, and what is refused before anything is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from inferencex.cli.console import exit_status
from inferencex.runtime.load_test.cli import app
from inferencex.runtime.load_test.connection import HttpClient, Origin
from inferencex.runtime.load_test.plan import Plan
from inferencex.runtime.load_test.statistics import Load

NOBODY = "http://127.0.0.1:9"


def refused(capsys: pytest.CaptureFixture[str], *options: str, status: int = 1) -> str:
    """Run the command, which must end with one line on standard error, and return that line."""
    assert exit_status(app, "inferencex bench", ["serve", *options]) == status
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    return captured.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--requests", "5", "--duration", "3"), "--requests and --duration"),
        (("--requests", "0"), "--requests 0: expected 1 or more"),
        (("--duration", "0"), "--duration 0.0: expected more than 0"),
        (("--timeout", "nan"), "--timeout nan"),
        (("--warm-up", "-1"), "--warm-up -1"),
        (("--rate", "fast"), "--rate fast"),
        (("--rate", "1,2", "--concurrency", "3,4"), "two sweeps"),
        (("--rate", "1,inf"), "inf is no rate to sweep to"),
        (("--fixed-rate",), "--fixed-rate needs a --rate"),
        (("--concurrency", "0"), "--concurrency 0"),
        (("--prompt-length", "long"), "--prompt-length long"),
        (("--output-length", "uniform:3"), "--output-length uniform:3"),
        (("--slo", "ttft"), "--slo ttft"),
        (("--no-stream", "--slo", "itl:5ms"), "--no-stream"),
        (("--extra", "{"), "--extra: is not JSON"),
        (("--extra", "[1]"), "--extra: is a JSON list"),
        (("--prompts", "nowhere.jsonl"), "--prompts nowhere.jsonl: cannot be read"),
        (("--output", "nowhere/results.json"), "--output nowhere/results.json: its folder does not exist"),
        (("--plot", "nowhere/plot.svg"), "--plot nowhere/plot.svg: its folder does not exist"),
        (("--tokenizer", "nowhere", "--model", "m"), "--tokenizer nowhere: cannot be read"),
        (("--api-key", "a\nb", "--model", "m"), "--api-key"),
    ],
)
def test_wrong_options_are_one_line(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str) -> None:
    assert said in refused(capsys, "--url", NOBODY, *options)


def test_wrong_use_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--url" in refused(capsys, status=2)
    assert "--endpoint" in refused(capsys, "--url", NOBODY, "--endpoint", "responses", status=2)


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{NOBODY} cannot be reached" in refused(capsys, "--url", NOBODY)


@pytest.mark.parametrize(
    "url", ["", "ftp://host", "http://", "http://host:port", "http://user:key@host", "http://h?x=1"]
)
def test_what_is_no_address_is_refused(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert "--url" in refused(capsys, "--url", url)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://host:8000", Origin("host", 8000, "", False)),
        ("host:8000", Origin("host", 8000, "", False)),
        ("http://host:8000/v1/", Origin("host", 8000, "", False)),
        ("https://host/llm/v1", Origin("host", 443, "/llm", True)),
        ("http://[::1]:80", Origin("::1", 80, "", False)),
    ],
)
def test_addresses(url: str, origin: Origin) -> None:
    assert Origin.parse(url) == origin
    request = HttpClient(Origin.parse(url), "key").encode("GET", "/v1/models").decode()
    assert request.startswith(f"GET {origin.prefix}/v1/models HTTP/1.1\r\nHost: {origin.authority}\r\n")
    assert "Authorization: Bearer key\r\n" in request and request.endswith("\r\n\r\n")


@pytest.fixture
def plan_of(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans of commands that are run, in place of measurements."""
    plans: list[Plan] = []

    async def keep(plan: Plan) -> bool:
        plans.append(plan)
        return True

    monkeypatch.setattr("inferencex.runtime.load_test.session.measure", keep)
    return plans


def run(*options: str) -> None:
    assert exit_status(app, "inferencex bench", ["serve", "--url", NOBODY, *options]) == 0


@pytest.mark.parametrize(
    ("options", "loads"),
    [
        ((), [Load(None, 1)]),
        (("--concurrency", "1,8"), [Load(None, 1), Load(None, 8)]),
        (("--rate", "4"), [Load(4, None)]),
        (("--rate", "1,2", "--concurrency", "9"), [Load(1, 9), Load(2, 9)]),
        (("--rate", "4", "--concurrency", "8,9"), [Load(4, 8), Load(4, 9)]),
    ],
)
def test_rates_and_concurrencies_make_loads(plan_of: list[Plan], options: tuple[str, ...], loads: list[Load]) -> None:
    run(*options)
    assert [*plan_of[0].loads] == loads


def test_defaults(plan_of: list[Plan]) -> None:
    run()
    run()
    first, second = plan_of
    assert (first.requests, first.duration, first.stream, first.as_text) == (100, None, True, False)
    assert first.seed != second.seed, "a run again must not ask what a prefix cache knows from the one before"
    run("--duration", "3", "--seed", "5", "--endpoint", "chat")
    assert (plan_of[2].requests, plan_of[2].seed, plan_of[2].as_text) == (None, 5, True)


def test_a_file_is_asked_once_through_all_loads(plan_of: list[Plan], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{place}"}) + "\n" for place in range(20)))
    run("--prompts", str(file), "--concurrency", "1,2")
    assert plan_of[0].requests == 9, "and one of ten warms up"
    run("--prompts", str(file), "--requests", "50")
    assert plan_of[1].requests == 50


def test_the_command_is_in_the_umbrella() -> None:
    from inferencex.cli.main import COMMANDS

    assert COMMANDS["bench"].module == "inferencex.runtime.load_test.cli"
    assert isinstance(app, typer.Typer)
