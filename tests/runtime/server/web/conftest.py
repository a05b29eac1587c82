"""A browser, and the page in it."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import uvicorn

from tests.runtime.server.web.scripted import Script, scripted_app

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_MS = 20_000  # for what takes milliseconds on a machine that does nothing else


def chromium() -> str | None:
    """Return the path of an installed Chromium, if there is one."""
    names = (os.environ.get("CHROMIUM"), *CHROMIUM)
    return next((path for name in names if name and (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Script]]:
    """The address of a running server, and its script."""
    script = Script()
    script.reset()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(scripted_app(script), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/", script
        script.go_on.set()
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium; skip where there is none. Kept for one module: its event loop must not meet others."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium; or set CHROMIUM to one)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def script(served: tuple[str, Script]) -> Script:
    """The script of the server, as it is at the start."""
    served[1].reset()
    return served[1]


@pytest.fixture
def page(browser: Browser, served: tuple[str, Script], script: Script) -> Iterator[Page]:
    """The page, open and empty, in a profile of its own. Whatever the browser complains about fails the test."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 800}, permissions=["clipboard-read", "clipboard-write"]
    )
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: line.type in ("error", "warning") and complaints.append(line.text))
    page.goto(served[0])
    yield page
    script.go_on.set()
    context.close()
    # A refused request is logged by the browser itself; what the page makes of it is for the tests to look at.
    assert [text for text in complaints if "Failed to load resource" not in text] == []
