"""What both ends of the gRPC contract share: version, limits, keepalive, safe reads, and errors as status codes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from tierd.errors import (
    AccessDenied,
    ChecksumMismatch,
    DaemonUnavailable,
    DataLoss,
    DeadlineExceeded,
    DriveError,
    LimitExceeded,
    SessionRefused,
    StoreDamaged,
    TierdError,
    UsageError,
)

__all__ = [
    "CHANNEL_OPTIONS",
    "CHUNK_BYTES",
    "KEEPALIVE_SECONDS",
    "MAX_MESSAGE_BYTES",
    "MAX_NAME_LENGTH",
    "PROTOCOL",
    "begin",
    "error_of",
    "plain_object",
    "read_safely",
    "server_options",
    "status_of",
]

PROTOCOL = 1
"""Version of proto/tierd/v1."""

CHUNK_BYTES = 1 << 20
"""Bulk bytes travel in chunks of 1 MiB, the fastest size on loopback."""

MAX_NAME_LENGTH = 64
"""Characters of a node's name."""

KEEPALIVE_SECONDS = 10.0
"""Silence after which a peer is asked for a sign of life; it has half as long again to give one."""

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message that is sent or taken, whatever it is."""

_MAX_CONNECTIONS = 8192


def _keepalive(seconds: float) -> list[tuple[str, int | str]]:
    return [
        ("grpc.keepalive_time_ms", max(1, int(seconds * 1000))),
        ("grpc.keepalive_timeout_ms", max(1, int(seconds * 500))),
        # Pings that measure the connection count too: while one is out, no other is sent; its default is a minute.
        ("grpc.http2.ping_timeout_ms", max(1, int(seconds * 1000))),
        # A session may be silent for hours; its pings must go on.
        ("grpc.http2.max_pings_without_data", 0),
    ]


CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *_keepalive(KEEPALIVE_SECONDS),
    ("grpc.use_local_subchannel_pool", 1),
    # Despite its name this bounds an attempt to connect: a daemon on a busy machine may need a while to say hello.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]


def server_options(*, keepalive_seconds: float, most_received: int = 256 << 10) -> list[tuple[str, int | str]]:
    """The server's side.

    Args:
        keepalive_seconds: a node that is silent for one and a half times as long has left.
        most_received: bytes of the largest message that clients may send.
    """
    return [
        # To a daemon clients send control messages only; an acquire of every expert of a layer is a few kilobytes.
        ("grpc.max_receive_message_length", most_received),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", 256),
        ("grpc.max_metadata_size", 16 << 10),
        # Who connects and says nothing, or never ends the TLS handshake, goes again.
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 300_000),
        ("grpc.max_allowed_incoming_connections", _MAX_CONNECTIONS),
        *_keepalive(keepalive_seconds),
        # The server must permit the client's pings.
        ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_SECONDS * 500)),
        ("grpc.so_reuseport", 0),
    ]


_Result = TypeVar("_Result")
_Message_co = TypeVar("_Message_co", covariant=True)


def begin(operation: Coroutine[Any, Any, _Result]) -> asyncio.Future[_Result]:
    """Begin a read or write on a server's stream that may be left behind: its error is then nobody's any more.

    Such an operation must not be cancelled, it would leak; it ends with its call.
    """
    future = asyncio.ensure_future(operation)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


class _Reader(Protocol[_Message_co]):
    async def read(self) -> _Message_co: ...

    def cancel(self) -> bool: ...


async def read_safely(call: _Reader[_Message_co]) -> _Message_co:
    """The next message of a client call, safe to cancel.

    In every grpcio that was tried, cancelling a task that awaits `call.read()` leaks the message being received. Here
    the pending read is shielded; on cancellation the call itself is cancelled and the read drained.
    """
    pending = asyncio.ensure_future(call.read())
    try:
        return await asyncio.shield(pending)
    except asyncio.CancelledError:
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await pending
        raise


_STATUS: list[tuple[type[TierdError], grpc.StatusCode]] = [
    (ChecksumMismatch, grpc.StatusCode.DATA_LOSS),
    (DataLoss, grpc.StatusCode.DATA_LOSS),
    (StoreDamaged, grpc.StatusCode.DATA_LOSS),
    (DriveError, grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (DaemonUnavailable, grpc.StatusCode.UNAVAILABLE),
    (AccessDenied, grpc.StatusCode.UNAUTHENTICATED),
    (LimitExceeded, grpc.StatusCode.INVALID_ARGUMENT),
    (SessionRefused, grpc.StatusCode.FAILED_PRECONDITION),
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
]


def status_of(error: TierdError) -> grpc.StatusCode:
    """The status code under which an error crosses the wire."""
    for kind, code in _STATUS:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def error_of(error: grpc.aio.AioRpcError, peer: str) -> TierdError:
    """The error that a status code of `peer` stands for on this side."""
    detail = error.details() or error.code().name
    found: TierdError
    match error.code():
        case grpc.StatusCode.DATA_LOSS:
            found = DataLoss(detail)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            found = DeadlineExceeded(f"{peer}: {detail}")
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.OUT_OF_RANGE | grpc.StatusCode.RESOURCE_EXHAUSTED:
            found = LimitExceeded(f"{peer} refused: {detail}")
        case grpc.StatusCode.UNAUTHENTICATED:
            found = AccessDenied(f"{peer} refused: {detail}")
        case grpc.StatusCode.UNIMPLEMENTED:
            found = SessionRefused(
                f"{peer} does not offer this call: {detail}",
                hint="A daemon that serves other hosts answers operators on its --local socket only.",
            )
        case grpc.StatusCode.FAILED_PRECONDITION:
            found = SessionRefused(f"{peer} refused: {detail}")
        case _:
            found = DaemonUnavailable(f"no answer from {peer}: {detail}", hint=_hint(detail))
    return found


def _hint(detail: str) -> str:
    """What a connection that broke off at once may mean."""
    if "Socket closed" in detail or "andshake" in detail:
        return "If it speaks TLS: nodes name its authority with --tls-ca FILE, operators use its --local socket."
    return ""


def plain_object(message: Message) -> dict[str, Any]:
    """A message as plain JSON values; 64-bit counters as numbers, not as strings as protobuf's JSON has them."""
    plain: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {name: value if name == "name" else _numbers(value) for name, value in plain.items()}


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: inner if name == "name" else _numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return int(value) if isinstance(value, str) and value.isdecimal() else value
