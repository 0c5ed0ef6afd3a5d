"""The node's side of the attach socket: from a token to mapped shared memory."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierd.arena.attach_wire import ANSWER_LENGTH, DESCRIPTORS, MAX_ANSWER_BYTES, ArenaDescription, hello
from tierd.arena.memory import PayloadView
from tierd.arena.session_block import SessionBlock
from tierd.arena.table import ResidencyView
from tierd.errors import ArenaError, DaemonUnavailable

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Attachment", "attach"]


@dataclass(slots=True)
class Attachment:
    """A session's shared memory, mapped. Made by `attach`.

    Attributes:
        payload: the experts' bytes.
        table: where each expert is.
        block: what this node tells the daemon.
        message_fd: a socket for the session's messages where the daemon's welcome says so, else of no use.
        lifeline: the connection; the daemon takes its end for this node's death.
        boot_id: 16 bytes that are different after every start of the daemon.
        slot_bytes: bytes of one slot.
        slots: number of slots.
        entries: number of experts.
    """

    payload: PayloadView
    table: ResidencyView
    block: SessionBlock
    message_fd: int
    lifeline: socket.socket
    boot_id: bytes
    slot_bytes: int
    slots: int
    entries: int
    _closed: bool = False

    def take_message_fd(self) -> int:
        """The socket for messages, which is the caller's from now on; -1 when it has been taken."""
        fd, self.message_fd = self.message_fd, -1
        return fd

    def slot_address(self, slot: int) -> int:
        """Address of the first byte of `slot` in this process."""
        return self.payload.address + slot * self.slot_bytes

    def alive(self) -> bool:
        """Whether the daemon still holds the other end. It never sends anything on it."""
        try:
            return bool(self.lifeline.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """End the life line and unmap; no address of the payload may be used afterwards."""
        self.lifeline.close()
        if not self._closed:
            self._closed = True
            if (fd := self.take_message_fd()) >= 0:
                os.close(fd)
            self.block.close()
            self.table.close()
            self.payload.close()


def attach(path: Path | str, token: bytes, timeout: float = 5.0) -> Attachment:
    """Redeem a token of the session's hello for the daemon's shared memory.

    Args:
        path: the attach socket, as the daemon named it.
        token: 32 bytes, good once and for a few seconds.
        timeout: seconds for all of it.

    Raises:
        DaemonUnavailable: nobody answers at `path`, or the daemon refused the token.
        ArenaError: what was handed over cannot be used.
    """
    deadline = time.monotonic() + timeout
    frame = hello(token)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        connection.settimeout(timeout)
        try:
            connection.connect(os.fspath(path))
            connection.sendall(frame)
            body = _receive(connection, fds, deadline)
        except TimeoutError as error:
            raise DaemonUnavailable(
                f"the daemon's attach socket {path} did not answer within {timeout:g} s",
                hint="Look whether the daemon is busy or stopped: `tierd stats`.",
            ) from error
        except OSError as error:
            raise DaemonUnavailable(
                f"the daemon's attach socket {path} cannot be used: {error.strerror or error}",
                hint="Start the daemon; in a container, share the directory of its socket.",
            ) from error
        return _map(ArenaDescription.parse(body), fds, connection)
    except BaseException:
        for fd in fds:
            os.close(fd)
        connection.close()
        raise


def _receive(connection: socket.socket, fds: list[int], deadline: float) -> bytes:
    """Read the answer; descriptors go to `fds` as they come, so that the caller can close them."""
    raw = bytearray()
    wanted = ANSWER_LENGTH.size
    while len(raw) < wanted:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        data, received, flags, _ = socket.recv_fds(connection, wanted - len(raw), DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        fds += received
        if flags & socket.MSG_CTRUNC or len(fds) > DESCRIPTORS:
            raise ArenaError(
                "some descriptors of the arena did not arrive", hint="Raise the limit of open files (ulimit -n)."
            )
        if not data:
            raise DaemonUnavailable(
                "the daemon closed the attach connection: the token was wrong, used or too old, or the user another",
                hint="Open a new session; run the node as the daemon's user.",
            )
        raw += data
        if len(raw) == ANSWER_LENGTH.size == wanted:
            (length,) = ANSWER_LENGTH.unpack(raw)
            if not 0 < length <= MAX_ANSWER_BYTES:
                raise ArenaError(f"the attach socket announced an answer of {length} bytes; it is not a tierd daemon")
            wanted += length
    if len(fds) != DESCRIPTORS:
        raise ArenaError(f"the daemon handed over {len(fds)} descriptors instead of {DESCRIPTORS}")
    return bytes(raw[ANSWER_LENGTH.size :])


def _map(description: ArenaDescription, fds: list[int], connection: socket.socket) -> Attachment:
    payload_fd, table_fd, block_fd, message_fd = fds
    table = ResidencyView.attach(table_fd)
    told = (description.boot_id, description.slot_bytes, description.slots, description.entries)
    header = table.header
    if (header.boot_id, header.slot_bytes, header.slots, header.entries) != told:
        raise ArenaError("the daemon's residency table belongs to another arena than it described")
    block = SessionBlock.attach(block_fd, description.entries)
    payload = PayloadView.attach(payload_fd, description.payload_bytes)
    # Mappings stay without their descriptors.
    for fd in fds[:3]:
        os.close(fd)
    fds.clear()
    connection.settimeout(None)
    return Attachment(
        payload=payload,
        table=table,
        block=block,
        message_fd=message_fd,
        lifeline=connection,
        boot_id=description.boot_id,
        slot_bytes=description.slot_bytes,
        slots=description.slots,
        entries=description.entries,
    )
