"""Takes the pictures of the chat page for the documentation: python -m tests.runtime.server.web.screenshots BUNDLE.

The bundle is served for real, other users ask it for stories meanwhile, and the page shows what it answered and what
the server says of its load. `--output` is another folder.
"""

from __future__ import annotations

import argparse
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.runtime.server.running import RunningServer
from tests.runtime.server.web.conftest import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[4]
QUESTIONS = ("What is gravity?", "Explain in a few sentences how rain forms.")
SUBJECTS = ("a lighthouse", "two brothers", "a slow train", "the last apple", "a clock", "the sea in winter")
USERS = 5
MOST_TOKENS = 220
PATIENCE_MS = 120_000
WATCHED_MS = 45_000  # how long the page looks on before the question, which fills its plot


def tell_stories(url: str, seed: int, done: threading.Event) -> None:
    """Ask for one story after the other, with a pause now and then, until it is enough."""
    chance = random.Random(seed)
    with httpx.Client(timeout=60) as client:
        while not done.wait(chance.expovariate(1.0)):
            words = {"role": "user", "content": f"Tell me a story about {chance.choice(SUBJECTS)}."}
            body = {"messages": [words], "max_tokens": chance.randrange(100, 700), "temperature": 1.0, "seed": seed}
            client.post(f"{url}/v1/chat/completions", json=body).raise_for_status()


@contextmanager
def other_users(url: str) -> Iterator[None]:
    """Let others use the server meanwhile."""
    done = threading.Event()
    users = [threading.Thread(target=tell_stories, args=(url, seed, done)) for seed in range(USERS)]
    for user in users:
        user.start()
    try:
        yield
    finally:
        done.set()
        for user in users:
            user.join()


def take(browser: Browser, url: str, scheme: str, size: tuple[int, int], path: Path) -> None:
    """Hold a short conversation and take a picture of the page."""
    page = browser.new_page(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    page.locator("#model:enabled").wait_for()
    limit = page.locator("#sampling-max_tokens")  # not in sight where the page is narrow
    limit.evaluate(f"field => field.value = {MOST_TOKENS}")
    page.wait_for_timeout(WATCHED_MS)
    for question in QUESTIONS:
        page.fill("#prompt", question)
        page.press("#prompt", "Enter")
        page.wait_for_timeout(1000)
        page.locator("#send:visible").wait_for()
    page.locator("#prompt").focus()
    page.screenshot(path=path)
    page.close()


def main() -> None:
    """Take all pictures."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--name", default="smollm2-135m-instruct", help="what the server calls the model")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    flags = ("--model-path", options.bundle, "--served-model-name", options.name, "--port", "0")
    with RunningServer(*flags) as server, sync_playwright() as playwright:
        url = server.wait_until_ready()
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        with other_users(url):
            for name, scheme, size in (
                ("chat-light", "light", (1280, 860)),
                ("chat-dark", "dark", (1280, 860)),
                ("chat-narrow", "light", (390, 780)),
            ):
                take(browser, url, scheme, size, options.output / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
