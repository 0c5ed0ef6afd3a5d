"""The daemon's HTTP side: /metrics, /healthz, /readyz and the web page, on the daemon's own loop."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tierd.addresses import Address
from tierd.errors import UsageError
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


class _Server(uvicorn.Server):
    """A server that leaves the process's signals alone: the daemon owns them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an application on a loopback address until told to stop."""

    def __init__(self, app: Starlette, address: Address) -> None:
        self._socket = _listen(address)
        bound = self._socket.getsockname()
        self.address = Address(host=address.host, port=int(bound[1]))
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=64,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2,
            http="h11",  # another parser, where one is installed, does not bound the head of a request
            h11_max_incomplete_event_size=16 << 10,
        )
        self._server = _Server(config)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self.address}"

    async def serve(self) -> None:
        """Serve until `stop`."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Finish what is being answered, then return from `serve`."""
        self._server.should_exit = True


def _listen(address: Address) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        host = str(ipaddress.ip_address("127.0.0.1" if address.host == "localhost" else address.host))
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, address.port))
            # At once, since the address is told before the server's first turn.
            listener.listen()
        except BaseException:
            listener.close()
            raise
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--http: cannot listen on {address}: {error}", hint="Name another port, or `--http off`."
        ) from error
    listener.setblocking(False)
    return listener
