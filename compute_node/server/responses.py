"""Answers on their way to the client: whole, or as server-sent events; either ends when the client goes away."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from compute_node.server.answering import Answering
from compute_node.server.problem import Problem, json_bytes
from compute_node.serving.requests import Done, Event, FinishReason
from tierd.errors import TierdError

__all__ = ["AnswerResponse", "AnswerWriter"]

_WAIT_SECONDS: Final = 3600.0
_STREAM_HEADERS: Final = {
    "Cache-Control": "no-cache",
    # Proxies that buffer would turn a stream into a long silence.
    "X-Accel-Buffering": "no",
}


class AnswerWriter(Protocol):
    """How one API writes an answer. Frames are whole server-sent events."""

    def begin(self) -> bytes:
        """Frames before the first token."""

    def feed(self, index: int, event: Event) -> bytes:
        """Takes an event of a choice; the frames that it makes."""

    def stopped(self, index: int) -> bool:
        """Whether a choice needs no more tokens, though the engine does not know."""

    def end(self) -> bytes:
        """Frames after the last choice has ended."""

    def failed(self, problem: Problem) -> bytes:
        """Frames that tell of a problem in the middle of a stream."""

    def pulse(self) -> bytes:
        """Frames that only show that the server is alive."""

    def whole(self) -> object:
        """All that was fed, as the JSON value of an answer that is not streamed."""


class AnswerResponse(Response):
    """Sends what the engine generates.

    Args:
        answering: the engine's side; given up when the client leaves or anything fails.
        writer: the API's side.
        stream: send events as they come.
        pulse_seconds: silence after which a stream shows that it is alive, and the longest that a stream waits with
            its headers: what goes wrong before gets a status of its own.
    """

    def __init__(
        self, answering: Answering, writer: AnswerWriter, *, stream: bool, pulse_seconds: float = 10.0
    ) -> None:
        super().__init__()
        self._answering = answering
        self._writer = writer
        self._stream = stream
        self._pulse_seconds = pulse_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers; see the class."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._send_events(scope, receive, send) if self._stream else self._send_whole(scope, receive, send))
        finally:
            self._answering.leave()
            watcher.cancel()
            await asyncio.wait([watcher])

    async def _watch(self, receive: Receive) -> None:
        """The request has been read, so that the next message is the client's going."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._answering.leave()

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while not self._answering.finished:
                await self._take(_WAIT_SECONDS)
                if self._answering.left:
                    return
            response = Response(json_bytes(self._writer.whole()), media_type="application/json")
        except Problem as problem:
            response = problem.response(scope["path"])
        await response(scope, receive, send)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            while not self._answering.finished:
                frames = await self._take(self._pulse_seconds)
                if self._answering.left:
                    return
                if not begun:
                    begun = True
                    start = Response(headers=_STREAM_HEADERS, media_type="text/event-stream; charset=utf-8")
                    del start.headers["content-length"]
                    await send({"type": "http.response.start", "status": 200, "headers": start.raw_headers})
                    frames = self._writer.begin() + frames
                await _send_body(send, frames or self._writer.pulse())
            await _send_body(send, self._writer.end(), more=False)
        except Problem as problem:
            if begun:
                await _send_body(send, self._writer.failed(problem), more=False)
            else:
                await problem.response(scope["path"])(scope, receive, send)

    async def _take(self, seconds: float) -> bytes:
        """Frames of what came within `seconds`.

        Raises:
            Problem: a choice failed.
        """
        frames = []
        for index, event in await self._answering.next(seconds):
            if isinstance(event, Done) and not self._writer.stopped(index):
                _check(event)
            frames.append(self._writer.feed(index, event))
            if self._writer.stopped(index) and not isinstance(event, Done):
                self._answering.stop(index)
        return b"".join(frames)


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _check(done: Done) -> None:
    """Problem if a choice did not end by itself."""
    if done.reason is FinishReason.ERROR:
        raise Problem.of(done.error or TierdError("the engine failed"))
    if done.reason is FinishReason.DEADLINE:
        raise Problem(
            504,
            f"the answer took longer than it may: {done.usage.seconds:.0f} s for "
            f"{done.usage.completion_tokens} tokens. Ask for fewer, or see --answer-seconds of the server.",
            code="deadline_exceeded",
        )
    if done.reason is FinishReason.CANCELLED:
        raise Problem(503, "the server is stopping", code="stopping", headers={"Retry-After": "5"})
