"""The daemon's HTTP side: /metrics, /healthz, /readyz and the web page, on the daemon's own loop."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tierd import http_server
from tierd.addresses import Address
from tierd.http_server import listen
from tierd.observe.page_files import PAGE_HEADERS, page_routes
from tierd.observe.page_stream import PageStream

__all__ = ["HttpServer", "make_app"]

_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
# A page on another name that resolves to this host must not read us through a browser (DNS rebinding).
_LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]"]


def make_app(
    metrics: Callable[[], bytes], ready: Callable[[], tuple[bool, str]], stream: PageStream | None = None
) -> Starlette:
    """The application; `ready` says whether nodes are served, and why not. Without a stream there is no page."""

    async def metrics_page(_request: Request) -> Response:
        return Response(metrics(), media_type=_EXPOSITION)

    async def healthz(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_request: Request) -> Response:
        is_ready, why = ready()
        return JSONResponse({"ready": is_ready, "reason": why}, status_code=200 if is_ready else 503)

    async def page_stream(_request: Request) -> Response:
        assert stream is not None
        if stream.full:
            return JSONResponse({"error": f"{stream.viewers} pages are open, the most that are served"}, 503)
        return StreamingResponse(stream.frames(), media_type="application/octet-stream", headers=PAGE_HEADERS)

    routes = [Route("/metrics", metrics_page), Route("/healthz", healthz), Route("/readyz", readyz)]
    if stream is not None:
        routes += [Route("/page/stream", page_stream), *page_routes()]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=_LOCAL_NAMES, www_redirect=False),
            Middleware(_OwnOrigin),
        ],
    )


class _OwnOrigin:
    """Refuses what a browser sends for another site's page; programs name no origin."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and origin != f"http://{headers.get('host', '')}":
                refusal = JSONResponse({"error": "requests of other sites' pages are refused"}, 403)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class HttpServer(http_server.HttpServer):
    """Serves an application on a loopback address until told to stop.

    Raises:
        UsageError: the address cannot be used.
    """

    def __init__(self, app: Starlette, address: Address) -> None:
        super().__init__(
            app,
            listen(address, hint="Name another port, or `--http off`."),
            address,
            limit_concurrency=64,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2,
            http="h11",  # another parser, where one is installed, does not bound the head of a request
            h11_max_incomplete_event_size=16 << 10,
        )
