"""The entrance: each request goes to its conversation's node, or to another while that one is away or full."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tierd.fleet.conversation import conversation_key, rank_nodes
from tierd.fleet.fleet_file import Entrance
from tierd.fleet.node_book import NodeBook
from tierd.fleet.passing import error_event, problem, request_headers, response_headers, whole_events
from tierd.fleet.serve_ports import keep_replica_to_loopback

__all__ = ["EntranceReplica"]

_CONNECT_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.1
_MOST_LOSSES: Final = 3
"""Nodes that may die under a request that nothing was answered to yet; the next one is asked instead."""
_MAX_ANSWER_BYTES: Final = 256 << 20
_BUSY: Final = frozenset({429, 503})
"""A node that says so has not begun; another one may have room."""


@dataclass(slots=True)
class _Errand:
    """A request on its way."""

    method: str
    path: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    key: int
    until: float
    busy: dict[str, Response] = field(default_factory=dict)
    losses: int = 0


class EntranceReplica:
    """What Ray Serve runs.

    A node that dies before anything of its answer has left costs its client nothing: another node is asked the same.
    After that, a stream ends with one event that says so.

    Args:
        settings: of the entrance, as plain values.
        nodes: names of the nodes' actors.
        namespace: of the fleet.
    """

    def __init__(self, settings: dict[str, Any], nodes: list[str], namespace: str) -> None:
        keep_replica_to_loopback()
        self._settings = Entrance(**settings)
        self._max_body = self._settings.max_body_bytes
        self._book = NodeBook(nodes, namespace)
        seconds = self._settings.answer_seconds
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(seconds, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            trust_env=False,
        )
        self._watching: asyncio.Task[None] | None = None

    async def __call__(self, request: Request) -> Response:
        """Answer a request, of whatever method and path."""
        if self._watching is None or self._watching.done():  # it ends by an error that nobody foresaw
            self._watching = asyncio.ensure_future(self._book.watch())
        path = request.url.path
        if path == "/health":
            return self._health()
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._max_body:
                return problem(path, 413, f"the body is larger than {self._settings.max_body}")
        errand = _Errand(
            request.method,
            path,
            f"{path}?{request.url.query}" if request.url.query else path,
            request_headers(request.headers.items()),
            bytes(body),
            conversation_key(request.headers, bytes(body)),
            time.monotonic() + self._settings.patience,
        )
        return await self._run(errand)

    async def _run(self, errand: _Errand) -> Response:
        while True:
            serving = self._book.serving()
            name = next((n for n in rank_nodes(errand.key, serving) if n not in errand.busy), None)
            if name is None:
                if errand.busy:
                    return next(iter(errand.busy.values()))
                if time.monotonic() > errand.until:
                    return problem(errand.path, 503, "no node of the fleet can be reached", again_in=5)
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            try:
                answer = await self._ask(errand, name, serving[name])
            except httpx.ReadTimeout:
                return problem(errand.path, 504, f"the node {name} did not answer within its time")
            except httpx.TransportError as error:
                self._book.lost(name, serving[name])
                errand.losses += 1
                if errand.losses > _MOST_LOSSES:
                    message = f"{errand.losses} nodes died under this request, the last one was {name}: {error}"
                    return problem(errand.path, 502, message)
                continue
            if answer.status_code not in _BUSY:
                return answer
            errand.busy[name] = answer

    async def _ask(self, errand: _Errand, name: str, address: str) -> Response:
        """The node's answer; whole, or a stream whose first event has come."""
        asked = self._client.build_request(
            errand.method, f"http://{address}{errand.target}", headers=errand.headers, content=errand.body
        )
        response = await self._client.send(asked, stream=True)
        headers = response_headers(response.headers, name)
        kept = False
        try:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                return Response(await _whole(response), response.status_code, headers)
            events = whole_events(response.aiter_raw())
            first = await anext(events, b"")
            kept = True
            stream = self._stream(errand.path, name, response, first, events)
            return StreamingResponse(stream, response.status_code, headers)
        finally:
            if not kept:
                await response.aclose()

    async def _stream(
        self, path: str, name: str, response: httpx.Response, first: bytes, events: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        try:
            yield first
            async for event in events:
                yield event
        except (httpx.TransportError, ValueError) as error:
            self._book.lost(name, response.url.netloc.decode())
            yield error_event(path, f"the node {name} was lost in the middle of this answer: {error or type(error)}")
        finally:
            await response.aclose()

    def _health(self) -> Response:
        states = self._book.states()
        up = sum(state == "serving" for state in states.values())
        content = json.dumps({"status": "ok" if up else "no node", "nodes": states})
        return Response(content, 200 if up else 503, media_type="application/json")


async def _whole(response: httpx.Response) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > _MAX_ANSWER_BYTES:
            raise httpx.RemoteProtocolError("the answer is too large")
    return bytes(content)
