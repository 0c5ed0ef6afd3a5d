"""A server of HTTP on the process's one loop that leaves the process's signals alone, and the socket it listens on."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tierd.addresses import Address
from tierd.errors import UsageError

__all__ = ["HttpServer", "listen"]


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Listens at once; answers from `serve` on.

    Args:
        app: what answers.
        listener: from `listen`.
        address: what was listened on; its port may have been any.
        limits: further options of `uvicorn.Config`.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket, address: Address, **limits: Any) -> None:
        self._socket = listener
        self.address = Address(host=address.host, port=int(listener.getsockname()[1]))
        config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, server_header=False, **limits)
        # What it imports would not be found by a server that has begun, and has no descriptor left.
        config.load()
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


def listen(address: Address, *, hint: str, backlog: int = 128, unread_bytes: int = 0) -> socket.socket:
    """A socket that listens on a host and a port.

    Args:
        address: port 0 is any.
        hint: what to do where it cannot be used.
        backlog: connections that may wait to be taken.
        unread_bytes: of answers that nobody reads, as many wait in the kernel; 0: its own bound.

    Raises:
        UsageError: the address cannot be used.
    """
    try:
        host = str(ipaddress.ip_address("127.0.0.1" if address.host == "localhost" else address.host))
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if unread_bytes:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, unread_bytes)
            listener.bind((host, address.port))
            # At once, since the address is told before the server's first turn.
            listener.listen(backlog)
        except BaseException:
            listener.close()
            raise
    except (OSError, ValueError) as error:
        raise UsageError(f"--http: cannot listen on {address}: {error}", hint=hint) from error
    listener.setblocking(False)
    return listener
