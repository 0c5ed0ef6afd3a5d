"""The daemon's HTTP side: /metrics, /healthz, /readyz, on the daemon's own loop."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tierd.addresses import Address
from tierd.errors import UsageError

__all__ = ["HttpServer", "make_app"]

_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
# A page on another name that resolves to this host must not read us through a browser (DNS rebinding).
_LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]"]


def make_app(metrics: Callable[[], bytes], ready: Callable[[], tuple[bool, str]]) -> Starlette:
    """The application; `ready` says whether nodes are served, and why not."""

    async def metrics_page(_request: Request) -> Response:
        return Response(metrics(), media_type=_EXPOSITION)

    async def healthz(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_request: Request) -> Response:
        is_ready, why = ready()
        return JSONResponse({"ready": is_ready, "reason": why}, status_code=200 if is_ready else 503)

    return Starlette(
        routes=[Route("/metrics", metrics_page), Route("/healthz", healthz), Route("/readyz", readyz)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=_LOCAL_NAMES, www_redirect=False)],
    )


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
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, address.port))
        # At once, since the address is told before the server's first turn.
        listener.listen()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--http: cannot listen on {address}: {error}", hint="Name another port, or `--http off`."
        ) from error
    listener.setblocking(False)
    return listener
