"""Serves an application on an address, on the process's one loop; the process's signals stay its own."""

from __future__ import annotations

import logging
from typing import Final

from starlette.types import ASGIApp

from compute_node.server.connection import connection_class
from tierd import http_server
from tierd.addresses import Address
from tierd.http_server import listen

__all__ = ["HttpServer"]


_UNREAD_BYTES: Final = 256 << 10
"""Of answers that wait in the kernel for a client to read; its own bound is 16 times as much."""


class HttpServer(http_server.HttpServer):
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
        # Its warnings tell of bad requests, one line each: that is for clients to know, not for our log.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        super().__init__(
            app,
            listen(
                address,
                hint="Name another port, or an address of this host.",
                backlog=256,
                unread_bytes=_UNREAD_BYTES,
            ),
            address,
            http=connection_class(head_seconds=head_seconds, read_seconds=read_seconds),
            ws="none",
            limit_concurrency=connections,
            timeout_keep_alive=int(head_seconds) or 1,
            timeout_graceful_shutdown=max(1, int(drain_seconds)),
            h11_max_incomplete_event_size=32 << 10,
        )
