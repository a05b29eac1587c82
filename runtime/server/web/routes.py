"""The routes of the page: its files from memory, with validators for caches and a strict content policy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response

ASSETS = Path(__file__).parent / "assets"
PAGE = "index.html"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Nothing but the files and the API of this server, and no way from a string to markup or script: whatever a model
# writes, the browser itself refuses to run it.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    # Kept by the browser, and asked about before every use: after an upgrade no page meets files of another version.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Asset:
    """One file of the page: its bytes, the type it is sent as, and the strong entity tag of its content."""

    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """Return the file, or 304 when the client says that it has it."""
        headers = {**HEADERS, "ETag": self.etag}
        if _matches(request.headers.get("if-none-match", ""), self.etag):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def read_assets(folder: Path = ASSETS) -> dict[str, Asset]:
    """Return the files below `folder` by their path relative to it, with slashes."""
    assets = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in MEDIA_TYPES and path.is_file():
            content = path.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            assets[path.relative_to(folder).as_posix()] = Asset(content, MEDIA_TYPES[path.suffix], tag)
    return assets


def router() -> APIRouter:
    """Return the routes `/` and `/assets/...`. They hold nothing secret and need no key; the page asks for one."""
    assets = read_assets()
    page = assets.pop(PAGE)
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return page.response(request)

    @routes.api_route("/assets/{path:path}", methods=["GET", "HEAD"])
    async def asset(request: Request, path: str) -> Response:
        found = assets.get(path)
        return Response(status_code=404) if found is None else found.response(request)

    return routes


def _matches(if_none_match: str, etag: str) -> bool:
    """Compare weakly, as RFC 9110 section 13.1.2 asks."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag in tags
