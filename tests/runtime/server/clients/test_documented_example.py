"""The examples of docs/serving.md that ask a server run as they are printed there."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.clients.conftest import DOCUMENTED_MODEL, KEY, Endpoint

PAGE = Path(__file__).resolve().parents[4] / "docs" / "serving.md"
DOCUMENTED_URL = "http://127.0.0.1:8000"


def documented(package: str) -> str:
    """Return the indented block of the page that begins by importing a package."""
    blocks = re.findall(r"(?:^ {4}.*\n|^\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    codes = [textwrap.dedent(block).strip() + "\n" for block in blocks]
    [code] = [code for code in codes if re.match(rf"(?:import json\n\n)?(?:import|from) {package}\b", code)]
    assert DOCUMENTED_URL in code and DOCUMENTED_MODEL in code and KEY in code
    return code


def printed(code: str) -> str:
    """Run a block, and return what it prints."""
    into = io.StringIO()
    with contextlib.redirect_stdout(into):
        exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})
    return into.getvalue()


def test_requests(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat with a key, whole and then streamed: both print the same answer."""
    requests = pytest.importorskip("requests", reason="needs the package requests")
    send = requests.Session.request

    def redirected(session: Any, method: str, url: str, **fields: Any) -> Any:
        assert url.startswith(DOCUMENTED_URL)
        return send(session, method, endpoint.url + url.removeprefix(DOCUMENTED_URL), **fields)

    monkeypatch.setattr(requests.Session, "request", redirected)
    text = printed(documented("requests"))
    whole, streamed = text[: len(text) // 2], text[len(text) // 2 :]
    assert whole == streamed and whole.strip()


def test_openai(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    openai = pytest.importorskip("openai", reason="needs the package openai")

    class Redirected(openai.OpenAI):  # type: ignore[misc]
        def __init__(self, *, base_url: str, **options: Any) -> None:
            assert base_url == f"{DOCUMENTED_URL}/v1"
            super().__init__(base_url=endpoint.api, **options)

    monkeypatch.setattr(openai, "OpenAI", Redirected)
    assert printed(documented("openai")).strip()
