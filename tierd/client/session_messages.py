"""How a node's engine thread talks with its session: by packets of a socket on one host, else by the stream's loop."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from queue import Empty
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from tierd.api import session_pb2 as pb
from tierd.client.loop_thread import LoopThread
from tierd.client.session_link import IDLE_RELEASE_SECONDS, SessionLink
from tierd.errors import DaemonUnavailable, TierdError

__all__ = ["Messages", "PacketMessages", "StreamMessages"]

_MOST_PACKET_BYTES: Final = 256 << 10
"""More than a daemon sends at once."""
_SLICE_SECONDS: Final = 0.25
"""A system call that waits ends so often, to see whether the session has."""
_LAST_WORDS_SECONDS: Final = 2.0
"""The stream says why a session ended a little after its socket has."""
_IDLE_LOOKS: Final = 10


class Messages(Protocol):
    """What the engine thread says and hears; one thread at a time."""

    @property
    def sent(self) -> int:
        """Messages since the hello."""

    def send(self, message: pb.OpenSessionRequest) -> None:
        """Say it; an error shows in `take`."""

    def mention(self, message: pb.OpenSessionRequest) -> None:
        """Say what changes nothing of what the session holds, and never wait for that."""

    def release_when_idle(self, acquire_id: int) -> None:
        """Give the acquire's grants back soon, unless the next acquire does so first."""

    def take(self, seconds: float) -> pb.Notice | TierdError:
        """The next answer, or why there is none any more.

        Raises:
            Empty: nothing came within so many seconds.
        """

    def close(self) -> None:
        """Give back what is its own; the session's stream is not."""


class StreamMessages:
    """By the stream.

    Args:
        link: the session.
        loop: it lives there.
    """

    def __init__(self, link: SessionLink, loop: LoopThread) -> None:
        self._link = link
        self._loop = loop

    @property
    def sent(self) -> int:
        """See `Messages`."""
        return self._link.sent

    def send(self, message: pb.OpenSessionRequest) -> None:
        """See `Messages.send`."""
        self._loop.call(self._link.send, message)

    def mention(self, message: pb.OpenSessionRequest) -> None:
        """See `Messages.mention`."""
        self._loop.call(self._link.mention, message)

    def release_when_idle(self, acquire_id: int) -> None:
        """See `Messages.release_when_idle`."""
        self._loop.call(self._link.release_when_idle, acquire_id)

    def take(self, seconds: float) -> pb.Notice | TierdError:
        """See `Messages.take`."""
        return self._link.inbox.get(timeout=max(0.0, seconds))

    def close(self) -> None:
        """Nothing is its own."""


class PacketMessages:
    """By the socket that came with the arena's descriptors.

    The engine thread itself makes the system calls, and sleeps in one while it waits. The loop's thread is woken only
    to give grants back, when the node computes for long.

    Args:
        link: the session, whose stream says why it ended.
        loop: for what happens later.
        fd: the socket; it belongs to this from now on.
    """

    def __init__(self, link: SessionLink, loop: LoopThread, fd: int) -> None:
        self.sent = 0
        self._link = link
        self._loop = loop
        self._socket = socket.socket(fileno=fd)
        slices = struct.pack("@ll", int(_SLICE_SECONDS), int(_SLICE_SECONDS % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, slices)
        self._packet = bytearray(_MOST_PACKET_BYTES)
        self._held: tuple[int, float] | None = None  # what is to be given back, and when
        self._watched = False
        self._closing = threading.Lock()
        self._closed = False
        link.ended = self._wake

    def send(self, message: pb.OpenSessionRequest) -> None:
        """See `Messages.send`."""
        self._held = None
        packet = message.SerializeToString()
        self.sent += 1
        while self._link.lost is None:
            try:
                self._socket.send(packet)
            except BlockingIOError:
                continue  # the daemon does not read: its stream tells when it has gone
            except OSError:
                pass  # it closed its end: so will the answers end
            return

    def mention(self, message: pb.OpenSessionRequest) -> None:
        """See `Messages.mention`."""
        with suppress(OSError):
            self._socket.send(message.SerializeToString(), socket.MSG_DONTWAIT)
            self.sent += 1

    def release_when_idle(self, acquire_id: int) -> None:
        """See `Messages.release_when_idle`."""
        self._held = (acquire_id, time.monotonic() + IDLE_RELEASE_SECONDS)
        if not self._watched:
            self._watched = True
            self._loop.call(self._watch, 0)

    def take(self, seconds: float) -> pb.Notice | TierdError:
        """See `Messages.take`."""
        until = time.monotonic() + seconds
        while True:
            try:
                nbytes = self._socket.recv_into(self._packet)
            except BlockingIOError:
                if self._link.lost is not None:
                    return self._link.lost
                if time.monotonic() >= until:
                    raise Empty from None
                continue
            except OSError:
                nbytes = 0
            if not nbytes:
                return self._last_words()
            try:
                message = pb.OpenSessionResponse.FromString(bytes(self._packet[:nbytes]))
            except DecodeError:
                return DaemonUnavailable("the daemon sent a packet that is no message")
            if message.WhichOneof("message") == "notice":
                return message.notice

    def close(self) -> None:
        """See `Messages.close`."""
        with self._closing:
            self._closed = True
            self._socket.close()

    def _last_words(self) -> TierdError:
        try:
            while not isinstance(answer := self._link.inbox.get(timeout=_LAST_WORDS_SECONDS), TierdError):
                pass
        except Empty:
            return DaemonUnavailable("the daemon closed the session's socket")
        return answer

    def _wake(self) -> None:
        """On the loop: the stream has ended, so whoever waits here waits in vain."""
        with self._closing, suppress(OSError):
            if not self._closed:
                self._socket.shutdown(socket.SHUT_RDWR)

    def _watch(self, idle: int) -> None:
        """On the loop, now and then: give grants back that were held for long enough.

        It goes on for a while after there was nothing to give back: to be woken for each stop of a step costs more.
        """
        held = self._held
        now = time.monotonic()
        if held is not None and held[1] <= now:
            release = pb.OpenSessionRequest(release=pb.Release(acquire_id=held[0]))
            with self._closing, suppress(OSError):
                if not self._closed:
                    # Counted before the daemon can have heard it, as by `send`. What is not held any more is not given
                    # back a second time: it does no harm.
                    self.sent += 1
                    self._socket.send(release.SerializeToString(), socket.MSG_DONTWAIT)
            if self._held is held:
                self._held = held = None
        idle = 0 if held is not None else idle + 1
        if idle < _IDLE_LOOKS and not self._closed:
            later = IDLE_RELEASE_SECONDS if held is None else max(0.0, held[1] - now)
            self._loop.loop.call_later(later, self._watch, idle)
            return
        self._watched = False
        if self._held is not None and not self._closed:
            self._watched = True
            self._loop.loop.call_later(IDLE_RELEASE_SECONDS, self._watch, 0)
