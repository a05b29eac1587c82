"""The files of the page: how they are sent, and that there is nothing in them that a strict browser refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from inferencex.runtime.server.web import router
from inferencex.runtime.server.web.routes import ASSETS, read_assets

SCRIPTS = sorted(ASSETS.rglob("*.js"))
FILES = [path for path in sorted(ASSETS.rglob("*")) if path.is_file()]


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.include_router(router())
    return TestClient(app)


def test_the_page_comes_with_a_strict_policy(client: TestClient) -> None:
    response = client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy and "http" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_served_as_what_it_is(client: TestClient, path: Path) -> None:
    name = path.relative_to(ASSETS).as_posix()
    response = client.get("/" if name == "index.html" else f"/assets/{name}")
    assert response.content == path.read_bytes()
    kind = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}[path.suffix]
    assert response.headers["content-type"].startswith(kind)


def test_a_known_version_is_not_sent_again(client: TestClient) -> None:
    etag = client.get("/assets/app.js").headers["etag"]
    for header in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        response = client.get("/assets/app.js", headers={"If-None-Match": header})
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == etag and "content-security-policy" in response.headers
    assert client.get("/assets/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


def test_tags_follow_the_content(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text("1")
    (tmp_path / "b.css").write_text("1")
    (tmp_path / "notes.txt").write_text("not part of the page")
    first = read_assets(tmp_path)
    assert first.keys() == {"a.js", "b.css"} and first["a.js"].etag == first["b.css"].etag
    (tmp_path / "a.js").write_text("2")
    assert read_assets(tmp_path)["a.js"].etag != first["a.js"].etag


def test_head_and_unknown_files(client: TestClient) -> None:
    response = client.head("/")
    assert (response.status_code, response.content) == (200, b"")
    for path in ("/assets/nothing.js", "/assets/../routes.py", "/assets/%2e%2e/routes.py", "/assets/index.html"):
        assert client.get(path).status_code == 404


def test_the_page_is_not_part_of_the_described_api(client: TestClient) -> None:
    assert not client.get("/openapi.json").json()["paths"]


def test_everything_that_is_named_exists() -> None:
    page = (ASSETS / "index.html").read_text(encoding="utf-8")
    for name in re.findall(r'(?:src|href)="assets/([^"]+)"', page):
        assert (ASSETS / name).is_file(), f"index.html names {name}"
    for path in SCRIPTS:
        for name in re.findall(r'from "(\.[^"]+)"', path.read_text(encoding="utf-8")):
            assert (path.parent / name).is_file(), f"{path.name} imports {name}"
    reachable = re.findall(r'from "(?:\./|\.\./)(?:markdown/)?([^"]+)"', "".join(p.read_text() for p in SCRIPTS))
    assert {path.name for path in SCRIPTS} == {*reachable, "app.js"}, "every script is imported by another"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_comes_from_elsewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"""(?:src|href)=["'](?:https?:)?//|url\(\s*["']?(?:https?:)?//|@import""", text)
    assert not re.search(r"""["'`]https?://\w""", text), "the page knows no address but its own"


def test_no_text_becomes_markup_or_script() -> None:
    page = (ASSETS / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)
    for path in SCRIPTS:
        found = re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|setHTML",
            path.read_text(encoding="utf-8"),
        )
        assert not found, f"{path.name} uses {found}"


def test_fields_have_labels_and_buttons_have_names() -> None:
    page = (ASSETS / "index.html").read_text(encoding="utf-8")
    for tag, attributes in re.findall(r"<(input|textarea|select)\b([^>]*)>", page):
        name = re.search(r'\bid="([^"]+)"', attributes)
        assert name, f"a {tag} has no id"
        labelled = f'for="{name[1]}"' in page or re.search(rf'<label[^>]*>(?:(?!</label>).)*id="{name[1]}"', page, re.S)
        assert labelled, f"{name[1]} has no label"
    for attributes, text in re.findall(r"<button\b([^>]*)>(.*?)</button>", page, re.S):
        assert text.strip() or "aria-label" in attributes
