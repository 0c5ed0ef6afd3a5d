"""The daemon's end of a pair of sockets over which a node on the same host talks with it, instead of by gRPC.

A message through gRPC wakes two threads of each process on its way; here a system call of the sender wakes the thread
that wants it. Each packet is one message of the session's stream, so nothing needs a frame. The stream itself stays:
it admits the node, says why a session ended, and notices a peer that is silent.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

__all__ = ["MOST_PACKET_BYTES", "MessageSocket"]

MOST_PACKET_BYTES: Final = 128 << 10
"""Of one message in either direction; kernels let as much through by default."""
_AT_A_TIME: Final = 16
"""Messages of one node that are taken before the loop turns to others."""
_MOST_UNSENT: Final = 256

# The loop's thread reads one packet at a time, and keeps none of it.
_packet = bytearray(MOST_PACKET_BYTES)


class MessageSocket:
    """One session's pair; made before the node attaches, and handed over with the arena's descriptors.

    Attributes:
        node_fd: the node's end; it belongs to the pair.
    """

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self.node_fd = self._theirs.fileno()
        self._heard: Callable[[bytes | None], object] = lambda _message: None
        self._unsent: deque[bytes] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<MessageSocket {self._ours.fileno()}, {len(self._unsent)} unsent>"

    def listen(self, heard: Callable[[bytes | None], object]) -> None:
        """Call `heard` on this loop with each message of the node; None is one that is too large to be one."""
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours.fileno(), self._read)

    def send(self, message: bytes) -> bool:
        """Send a message soon; False if the node does not read what it is sent."""
        if self._loop is None:
            return True
        if self._unsent:
            self._unsent.append(message)
            return len(self._unsent) <= _MOST_UNSENT
        try:
            self._ours.send(message)
        except BlockingIOError:
            self._unsent.append(message)
            self._loop.add_writer(self._ours.fileno(), self._write)
        except OSError as error:
            # Its end is closed: its stream, or its life line, will say so as well.
            return error.errno != errno.EMSGSIZE
        return True

    def shut(self) -> None:
        """Nothing is said or heard any more, and the node knows; harmless when repeated."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.remove_reader(self._ours.fileno())
            loop.remove_writer(self._ours.fileno())
            self._unsent.clear()
            with suppress(OSError):
                self._ours.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give both ends back; the node keeps its own."""
        self.shut()
        self._ours.close()
        self._theirs.close()

    def _read(self) -> None:
        for _ in range(_AT_A_TIME):
            try:
                nbytes = self._ours.recv_into(_packet, 0, socket.MSG_TRUNC)
            except BlockingIOError:
                return
            except OSError:
                nbytes = 0
            if not nbytes:
                # The node closed its end: the life line decides what that means.
                if self._loop is not None:
                    self._loop.remove_reader(self._ours.fileno())
                return
            self._heard(bytes(_packet[:nbytes]) if nbytes <= MOST_PACKET_BYTES else None)
            if self._loop is None:
                return

    def _write(self) -> None:
        try:
            while self._unsent:
                self._ours.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        if self._loop is not None:
            self._loop.remove_writer(self._ours.fileno())
