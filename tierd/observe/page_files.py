"""The web page's own files: read once from the package, served as they are; the page asks nobody else for anything."""

from __future__ import annotations

from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["PAGE_HEADERS", "page_routes"]

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """One route per file; `/` is index.html."""
    routes = []
    for entry in resources.files("tierd.observe").joinpath("page").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in _TYPES:
            path = "/" if entry.name == "index.html" else f"/page/{entry.name}"
            routes.append(_route(path, entry.read_bytes(), _TYPES[suffix]))
    return routes


def _route(path: str, content: bytes, media_type: str) -> Route:
    async def answer(_request: Request) -> Response:
        return Response(content, media_type=media_type, headers=PAGE_HEADERS)

    return Route(path, answer)
