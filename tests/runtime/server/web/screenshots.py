"""Takes the pictures of the chat page for the documentation: python -m tests.runtime.server.web.screenshots.

A scripted server answers, so that the pictures are the same wherever they are taken. `--output` is another folder.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from tests.runtime.server.web.conftest import chromium
from tests.runtime.server.web.scripted import Script, model_status, scripted_app

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[4]
QUESTION = "How does a server answer many people at once?"
THOUGHTS = "They want the idea, not the code. Batching first, then why memory is the limit."
ANSWER = """It works on **all of their answers together**, one token at a time:

1. Every request keeps the keys and values of its tokens in *blocks* of the KV cache.
2. Each step takes what is ready, from everyone, and computes one batch.
3. Who is finished leaves, and whoever waits takes the place at once.

| requests | tokens/s each | tokens/s in all |
|---:|---:|---:|
| 1 | 52 | 52 |
| 8 | 31 | 248 |
| 32 | 14 | 448 |

```python
while requests:
    batch = scheduler.next_step(requests)
    tokens = model(batch)
    requests = [r for r in batch if not r.finished(tokens)]
```"""
LOAD = (3, 4, 6, 5, 7, 9, 8, 11, 12, 10, 9, 12, 14, 13, 11, 10, 8, 9, 7, 8, 10, 11, 9, 12, 13, 11, 10, 12)


def spoken(text: str) -> Iterator[str | float]:
    """Yield words, and the time that a small model takes for each."""
    for word in text.split(" "):
        yield f"{word} "
        yield 0.02


def statuses() -> Iterator[dict[str, Any]]:
    """Yield what the server says of its load, time after time."""
    generated = 0
    for running in itertools.chain(LOAD, itertools.repeat(11)):
        generated += running * 45
        model = model_status(
            running=running,
            waiting=max(0, running - 12),
            kv_blocks=4096,
            kv_blocks_used=running * 190,
            generated_tokens=generated,
            prompt_tokens=900,
            cached_tokens=520,
        )
        yield {"ready": True, "draining": False, "models": [model]}


def take(browser: Browser, url: str, script: Script, scheme: str, size: tuple[int, int], path: Path) -> None:
    """Hold a short conversation and take a picture of the page."""
    script.reset()
    script.models = ["smollm2-135m-instruct", "qwen3-0.6b"]
    script.answers.append([{"reasoning_content": THOUGHTS}, *spoken(ANSWER)])
    script.statuses = statuses()
    page = browser.new_page(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page.clock.install()
    page.goto(url)
    page.locator("#model:enabled").wait_for()
    for _ in LOAD:
        with page.expect_response("**/v1/status"):
            page.clock.run_for(2000)
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    page.clock.resume()
    page.locator("#send:visible").wait_for()
    page.get_by_role("button", name="Regenerate").wait_for()
    page.locator("#prompt").focus()
    page.screenshot(path=path)
    page.close()


def main() -> None:
    """Take all pictures."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    script = Script()
    with socket.socket() as listener, sync_playwright() as playwright:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(scripted_app(script), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        for name, scheme, size in (
            ("chat-light", "light", (1280, 860)),
            ("chat-dark", "dark", (1280, 860)),
            ("chat-narrow", "light", (390, 780)),
        ):
            take(browser, url, script, scheme, size, output / f"{name}.png")
        browser.close()
        server.should_exit = True
        thread.join(10)


if __name__ == "__main__":
    main()
