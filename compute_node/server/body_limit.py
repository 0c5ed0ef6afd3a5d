"""How much a client may send, and how long it may take; counted as it is read, whatever a header promises."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compute_node.server.problem import Problem

__all__ = ["BodyLimit"]

_CLOSE: Final = {"Connection": "close"}
_UNHEARD: Final = 4
"""So many times what a body may have is read of one that is too large, and thrown away."""


class BodyLimit:
    """Refuses bodies that are too large or too slow.

    Args:
        app: what reads the bodies.
        max_bytes: of a body.
        seconds: from a request's head to the end of its body.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on with its body counted."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "0")
        body = _Body(receive, self._max_bytes, asyncio.get_running_loop().time() + self._seconds, self._seconds)
        started = False

        async def note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            if announced.isdigit() and len(announced) < 20 and int(announced) > self._max_bytes:
                raise body.too_large()
            await self._app(scope, body.receive, note)
        except Problem as problem:
            if started:
                raise
            if problem.status == 413 and "expect" not in headers:
                await body.discard()
            await problem.response(scope["path"])(scope, receive, send)


class _Body:
    """One request's body on its way."""

    def __init__(self, receive: Receive, max_bytes: int, deadline: float, seconds: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._deadline = deadline
        self._seconds = seconds
        self._read = 0
        self._whole = False

    async def receive(self) -> Message:
        """The next part; once all are here, the client's going, which may take as long as it likes.

        Raises:
            Problem: too much, or too late.
        """
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise Problem(408, f"the request's body did not come within {self._seconds:g} s", headers=_CLOSE) from None
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            if self._read > self._max_bytes:
                raise self.too_large()
        return message

    async def discard(self) -> None:
        """Read on for a while: most clients listen only once they have sent everything."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._deadline):
                while not self._whole and self._read <= _UNHEARD * self._max_bytes:
                    message = await self._receive()
                    self._read += len(message.get("body", b""))
                    self._whole = not message.get("more_body", False)

    def too_large(self) -> Problem:
        """The refusal; the connection ends with it, since not all that still comes is read."""
        return Problem(
            413,
            f"the request's body is larger than {self._max_bytes} bytes; see --max-body",
            code="request_too_large",
            headers=_CLOSE,
        )
