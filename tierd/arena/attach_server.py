"""The daemon's side of the attach socket: one-time tokens in, descriptors out, then the life line of the session.

gRPC cannot carry descriptors, so a Unix socket does. Whatever a peer does, its connection alone suffers: wrong
tokens, garbage, silence and too many connections are closed, each within a bound.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import stat
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from tierd.addresses import MAX_SOCKET_PATH
from tierd.arena.attach_wire import HELLO_BYTES, TOKEN_BYTES, token_of
from tierd.errors import ArenaError, LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierd.arena.attach_wire import ArenaOffer

__all__ = ["AttachServer"]

_OFFER_SECONDS: Final = 10.0
_HELLO_SECONDS: Final = 5.0
_MAX_OFFERS: Final = 256
_PEER: Final = struct.Struct("iII")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    session_id: int
    block_fd: int
    message_fd: int
    expires: float


class AttachServer:
    """Hands the arena to nodes of the daemon's own user, and watches over their lives.

    Args:
        path: of the Unix socket; its directory is made with mode 0700 where it does not exist.
        offer: what every session gets.
        on_gone: called once, on the loop, with the number of a session whose life line ended.
        max_connections: connections at a time, attached ones included; more are closed at once.
        clock: seconds, rising; for the expiry of tokens.

    Attributes:
        refused: connections that were closed without being attached.
    """

    def __init__(
        self,
        path: Path,
        offer: ArenaOffer,
        on_gone: Callable[[int], None],
        *,
        max_connections: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refused = 0
        self._path = path
        self._offer = offer
        self._on_gone = on_gone
        self._max_connections = max_connections
        self._clock = clock
        self._pending: dict[bytes, _Pending] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._lifelines: dict[int, asyncio.Task[None]] = {}
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._inode = 0

    async def start(self) -> None:
        """Listen.

        Raises:
            ArenaError: the path is too long, its directory is open to other users, or another daemon listens there.
        """
        self._listener = _listen(self._path)
        self._inode = self._path.stat().st_ino
        self._accepting = asyncio.create_task(self._accept(self._listener), name="attach-accept")

    async def close(self) -> None:
        """Stop listening and end all life lines; `on_gone` is not called for them."""
        if self._listener is None or self._accepting is None:
            return
        tasks = [self._accepting, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        self._listener = None
        self._pending.clear()
        # A successor may have put its own socket there already.
        if self._path.exists() and self._path.stat().st_ino == self._inode:
            self._path.unlink()

    def offer(self, session_id: int, *, block_fd: int, message_fd: int) -> bytes:
        """A token with which one connection, within 10 s, becomes the life line of `session_id`.

        Args:
            session_id: number of the session.
            block_fd: read-write descriptor of its session block.
            message_fd: the node's end of its socket for messages. Both stay the caller's and must live until `end` or
                `on_gone`.

        Raises:
            LimitExceeded: too many tokens are outstanding.
        """
        now = self._clock()
        self._pending = {token: p for token, p in self._pending.items() if p.expires > now}
        if len(self._pending) >= _MAX_OFFERS:
            raise LimitExceeded(
                f"{_MAX_OFFERS} sessions are about to attach already", hint="Wait some seconds and try again."
            )
        token = secrets.token_bytes(TOKEN_BYTES)
        self._pending[token] = _Pending(session_id, block_fd, message_fd, now + _OFFER_SECONDS)
        return token

    def end(self, session_id: int) -> None:
        """Drop the session's token and close its life line; `on_gone` is not called for it."""
        self._pending = {token: p for token, p in self._pending.items() if p.session_id != session_id}
        lifeline = self._lifelines.pop(session_id, None)
        if lifeline is not None:
            lifeline.cancel()

    def attached(self, session_id: int) -> bool:
        """Whether the session has a life line now."""
        return session_id in self._lifelines

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Out of descriptors, most likely: the peer waits in the backlog until some come back.
                _log.warning("attach socket cannot accept", path=str(self._path), error=str(error))
                await asyncio.sleep(0.1)
                continue
            connection.setblocking(False)
            if len(self._connections) >= self._max_connections:
                self.refused += 1
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection), name="attach-connection")
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            session_id = await self._attach(connection)
            if session_id is None:
                self.refused += 1
                return
            this = asyncio.current_task()
            assert this is not None
            self._lifelines[session_id] = this
            await _until_end(connection)
            if self._lifelines.get(session_id) is this:
                del self._lifelines[session_id]
                self._on_gone(session_id)

    async def _attach(self, connection: socket.socket) -> int | None:
        """Check the peer and its token and hand over the descriptors; None if it is refused."""
        user = _peer_user(connection)
        if user not in (0, os.geteuid()):
            _log.warning("attach refused: peer runs as another user", path=str(self._path), user=user)
            return None
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                token = token_of(await _receive_exactly(connection, HELLO_BYTES))
        except (OSError, TimeoutError):
            return None
        pending = self._pending.pop(token, None) if token is not None else None
        if pending is None or pending.expires <= self._clock() or pending.session_id in self._lifelines:
            _log.warning("attach refused: token wrong, used or expired", path=str(self._path))
            return None
        fds = [self._offer.payload_fd, self._offer.table_fd, pending.block_fd, pending.message_fd]
        answer = self._offer.answer()
        try:
            # The peer has sent 40 bytes and was sent none: the answer fits the empty buffer or the peer is strange.
            sent = socket.send_fds(connection, [answer], fds)
        except OSError as error:
            _log.warning("attach failed", path=str(self._path), session=pending.session_id, error=str(error))
            return None
        return pending.session_id if sent == len(answer) else None


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ArenaError(
            f"the attach socket's path is longer than {MAX_SOCKET_PATH} bytes: {path}",
            hint="Choose a shorter directory for the socket.",
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_directory(path)
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(64)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ArenaError(
            f"the attach socket {path} cannot be made: {error.strerror or error}",
            hint="Give the daemon a directory of its own for its sockets.",
        ) from error
    return listener


def _check_directory(path: Path) -> None:
    status = path.parent.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise ArenaError(
            f"the directory {path.parent} of the attach socket can be changed by other users",
            hint=f"Run `chmod 700 {path.parent}`, or choose a directory that belongs to the daemon's user.",
        )


def _remove_stale(path: Path) -> None:
    """Remove the socket that a killed daemon left; never anything else, never a living one's."""
    if not path.exists():
        return
    if not path.is_socket():
        raise ArenaError(f"{path} exists and is not a socket", hint="Choose another path for the attach socket.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except TimeoutError:
            pass
    raise ArenaError(
        f"another daemon listens on the attach socket {path}", hint="Stop it, or choose another path for this one."
    )


def _peer_user(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    user: int = _PEER.unpack(raw)[1]
    return user


async def _receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    raw = b""
    while len(raw) < nbytes:
        data = await loop.sock_recv(connection, nbytes - len(raw))
        if not data:
            break
        raw += data
    return raw


async def _until_end(connection: socket.socket) -> None:
    """Return when the peer is gone, or sends what it never should."""
    try:
        if await asyncio.get_running_loop().sock_recv(connection, 1):
            _log.warning("attach: the node wrote to its life line, which ends it")
    except OSError:
        # A reset is an end as good as any.
        return
