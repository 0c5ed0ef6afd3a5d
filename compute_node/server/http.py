"""Serves an application on an address, on the process's one loop; the process's signals stay its own."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from compute_node.server.connection import connection_class
from tierd.addresses import Address
from tierd.errors import UsageError

__all__ = ["HttpServer"]


_UNREAD_BYTES: Final = 256 << 10


class _Server(uvicorn.Server):
    """A server that leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Listens at once; answers from `serve` on.

    Args:
        app: what answers.
        address: host and port; port 0 is any.
        connections: most at once; more are told to come back.
        head_seconds: bound on a request's head.
        read_seconds: bound on a client that does not read.
        drain_seconds: bound on answers that are under way at the end.

    Raises:
        UsageError: the address cannot be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        address: Address,
        *,
        connections: int = 512,
        head_seconds: float = 20.0,
        read_seconds: float = 30.0,
        drain_seconds: float = 10.0,
    ) -> None:
        self._socket = _listen(address)
        self.address = Address(host=address.host, port=int(self._socket.getsockname()[1]))
        # Its warnings tell of bad requests, one line each: that is for clients to know, not for our log.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            app,
            http=connection_class(head_seconds=head_seconds, read_seconds=read_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=connections,
            timeout_keep_alive=int(head_seconds) or 1,
            timeout_graceful_shutdown=max(1, int(drain_seconds)),
            h11_max_incomplete_event_size=32 << 10,
        )
        self._server = _Server(config)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self.address}"

    async def serve(self) -> None:
        """Answers until `stop`."""
        await self._server.serve(sockets=[self._socket])

    def close(self) -> None:
        """Frees the address of a server that never answered, or has done so; harmless when repeated."""
        self._socket.close()

    def stop(self) -> None:
        """Finish what is being answered, then return from `serve`. From any thread."""
        self._server.should_exit = True


def _listen(address: Address) -> socket.socket:
    try:
        host = str(ipaddress.ip_address("127.0.0.1" if address.host == "localhost" else address.host))
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Answers that nobody reads wait in the kernel up to here; its own bound is 16 times as much.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
            listener.bind((host, address.port))
            # At once, since the address is told before the server's first turn.
            listener.listen(256)
        except BaseException:
            listener.close()
            raise
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--http: cannot listen on {address}: {error}", hint="Name another port, or an address of this host."
        ) from error
    listener.setblocking(False)
    return listener
