"""One client's connection: uvicorn's protocol, with a bound on every wait for the client.

A client that begins a request and does not end its head, that does not read its answer, or that has vanished without a
word must not hold a connection for ever.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

__all__ = ["BoundedConnection", "connection_class"]

_ABOVE_LIMIT: Final = 2
"""Connections up to this multiple of uvicorn's limit are told that there are too many; others are closed unheard."""


class BoundedConnection(H11Protocol):
    """A connection with time limits.

    Attributes:
        head_seconds: from the connection, or the last answer, to the end of a request's head.
        read_seconds: how long the client may leave an answer unread, and a closed connection open.
    """

    head_seconds = 20.0
    read_seconds = 30.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here; too many are sent away at once."""
        super().connection_made(transport)
        limit = self.limit_concurrency
        if limit is not None and len(self.connections) > _ABOVE_LIMIT * limit:
            transport.abort()
            return
        if (connection := transport.get_extra_info("socket")) is not None:
            _keep_alive(connection)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of it."""
        self._head_is_here()
        self._is_read()
        # uvicorn leaves its own timer where the connection was aborted.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request; uvicorn takes its own timer away at the first one, ours stays until the head is whole.

        A request that comes before the last one is answered is dropped, and the connection ends with the answer: else
        uvicorn would stop reading to keep it, and not see any more that the client goes away. Clients send it again.
        """
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            cycle.keep_alive = False
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._head_is_here()

    def on_response_complete(self) -> None:
        """An answer has been sent; the next request has its time, and a closing connection has to close."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reading()
        elif self.conn.their_state is h11.IDLE:
            self._await_head()

    def pause_writing(self) -> None:
        """The client does not read as fast as we write."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._is_read()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _head_is_here(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _await_reading(self) -> None:
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(self.read_seconds, self.transport.abort)

    def _is_read(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None


def connection_class(*, head_seconds: float, read_seconds: float) -> type[BoundedConnection]:
    """The class with other limits."""
    return type("Connection", (BoundedConnection,), {"head_seconds": head_seconds, "read_seconds": read_seconds})


def _keep_alive(connection: socket.socket) -> None:
    """Lets the kernel find out that a silent client's host is gone: within a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
