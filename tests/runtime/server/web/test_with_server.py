"""The page with the server itself: its headers, keys, status and streams are what the page takes them to be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.runtime.server.running import RunningServer

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

KEY = "ix-a-key-of-the-tests"
ANSWER = '#messages [data-role="assistant"]'


def arguments(bundle: Path) -> list[str | Path]:
    return [
        *("--model-path", bundle, "--served-model-name", "tiny", "--port", "0"),
        *("--api-key", KEY, "--threads", "1"),
    ]


@pytest.fixture(scope="module")
def server(browser: Browser, tiny_chat_bundle: Path) -> Iterator[RunningServer]:
    # The browser comes first: without one, no server is started for nothing.
    with RunningServer(*arguments(tiny_chat_bundle)) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def slow_server(browser: Browser, tiny_chat_bundle: Path) -> Iterator[RunningServer]:
    with RunningServer(*arguments(tiny_chat_bundle), "--filter", "tests.runtime.server.web.slow:Slow") as running:
        running.wait_until_ready()
        yield running


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    yield from opened(browser, server)


@pytest.fixture
def slow_page(browser: Browser, slow_server: RunningServer) -> Iterator[Page]:
    yield from opened(browser, slow_server)


def opened(browser: Browser, server: RunningServer) -> Iterator[Page]:
    page = browser.new_page()
    page.set_default_timeout(30_000)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: line.type in ("error", "warning") and complaints.append(line.text))
    page.goto(server.url)
    yield page
    page.close()
    assert [text for text in complaints if "Failed to load resource" not in text] == [], (
        "nothing breaks the policy that is sent"
    )


def test_a_conversation_with_a_key(page: Page) -> None:
    expect(page.locator("#health-text")).to_have_text("Key needed", timeout=30_000)
    page.fill("#key", KEY)
    page.press("#key", "Tab")
    expect(page.locator("#model option")).to_have_text(["tiny"], timeout=30_000)
    expect(page.locator("#health-text")).to_have_text("Ready")
    expect(page.locator(".meter dd").nth(1)).to_contain_text(re.compile(r"0 % of [\d,]+ tokens"))
    page.fill("#sampling-max_tokens", "24")
    page.fill("#sampling-temperature", "0")
    for turn in (1, 2):
        page.fill("#prompt", f"Message {turn}")
        page.press("#prompt", "Enter")
        expect(page.locator(f"{ANSWER} .figures").nth(turn - 1)).to_contain_text(
            re.compile(r"first token after [\d.]+ s · \d+ tokens?"), timeout=30_000
        )
        expect(page.locator("#send")).to_be_visible()
    expect(page.get_by_role("alert")).not_to_be_visible()


def test_the_servers_refusals_are_shown(page: Page) -> None:
    page.fill("#key", KEY)
    page.press("#key", "Tab")
    page.locator("#model:enabled").wait_for()
    page.fill("#sampling-max_tokens", "100000")
    page.fill("#prompt", "Hi")
    page.press("#prompt", "Enter")
    expect(page.get_by_role("alert")).to_contain_text("100000", timeout=30_000)
    expect(page.get_by_role("alert")).to_contain_text("Change the message or the settings")


def test_a_stopped_answer_ends_in_the_server(slow_page: Page) -> None:
    page = slow_page
    page.fill("#key", KEY)
    page.press("#key", "Tab")
    page.locator("#model:enabled").wait_for()
    page.evaluate("key => { window.headers = { Authorization: `Bearer ${key}` } }", KEY)
    page.fill("#prompt", "Go on")
    page.press("#prompt", "Enter")
    page.locator("#stop:visible").wait_for()
    page.locator(f"{ANSWER} .figures:not(:empty)").wait_for(state="attached")
    page.keyboard.press("Escape")
    page.locator("#send:visible").wait_for()
    page.wait_for_function(
        "async () => (await (await fetch('v1/status', { headers: window.headers })).json()).requests_in_flight === 0"
    )
