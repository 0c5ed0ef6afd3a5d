"""The chat page's own files: a fixed table, read once from the package; the page asks nobody else for anything."""

from __future__ import annotations

from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["page_routes"]

_FILES: Final = {
    "index.html": ("/", "text/html; charset=utf-8"),
    "page.css": ("/page/page.css", "text/css; charset=utf-8"),
    "page.js": ("/page/page.js", "text/javascript; charset=utf-8"),
    "stream.js": ("/page/stream.js", "text/javascript; charset=utf-8"),
    "icon.svg": ("/page/icon.svg", "image/svg+xml"),
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """One route per file; no path that a client names is ever looked for on disk."""
    folder = resources.files("compute_node.server").joinpath("page")
    return [_route(path, folder.joinpath(name).read_bytes(), kind) for name, (path, kind) in _FILES.items()]


def _route(path: str, content: bytes, media_type: str) -> Route:
    async def answer(_request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return Route(path, answer, include_in_schema=False)
