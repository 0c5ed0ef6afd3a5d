"""Forms of what passes through the entrance: headers, whole events of a stream, and errors as clients expect them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final

from starlette.responses import Response

__all__ = ["error_event", "problem", "request_headers", "response_headers", "whole_events"]

_HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade", "proxy-connection"}
)  # fmt: skip
"""RFC 9110, 7.6.1: they concern one connection."""
_MAX_EVENT_BYTES: Final = 16 << 20
_END: Final = b"\n\n"


def request_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """What of a client's headers goes to the node; Host too, by which the node judges who may call it."""
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP | {"content-length", "expect"}]


def response_headers(headers: Mapping[str, str], node: str) -> dict[str, str]:
    """What of a node's headers goes to the client, and the node's name."""
    left_out = _HOP_BY_HOP | {"content-length", "date", "server"}
    kept = {name: value for name, value in headers.items() if name.lower() not in left_out}
    return {**kept, "x-tierd-node": node}


async def whole_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Server-sent events as they become whole, so that a stream which breaks off breaks off between two of them.

    Raises:
        ValueError: an event of more than 16 MiB.
    """
    held = b""
    async for chunk in chunks:
        held += chunk
        end = held.rfind(_END)
        if end >= 0:
            yield held[: end + len(_END)]
            held = held[end + len(_END) :]
        if len(held) > _MAX_EVENT_BYTES:
            raise ValueError("an event is too large")
    if held:
        yield held


def problem(path: str, status: int, message: str, *, again_in: int | None = None) -> Response:
    """An error in the form of the API that the path belongs to."""
    headers = {} if again_in is None else {"retry-after": str(again_in)}
    return Response(json.dumps(_error(path, message)), status, headers, media_type="application/json")


def error_event(path: str, message: str) -> bytes:
    """The last event of a stream that cannot go on."""
    kind = "event: error\n" if _is_messages(path) else ""
    return f"{kind}data: {json.dumps(_error(path, message))}{_END.decode()}".encode()


def _error(path: str, message: str) -> dict[str, Any]:
    if _is_messages(path):
        return {"type": "error", "error": {"type": "api_error", "message": message}}
    return {"error": {"message": message, "type": "server_error", "param": None, "code": None}}


def _is_messages(path: str) -> bool:
    return path.startswith("/v1/messages")
