"""One compute node's session: its answers on the way to it, its end, and what is remembered of it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from tierd.api import session_pb2 as pb
from tierd.errors import LimitExceeded, TierdError
from tierd.requests import Granted, Outcome, Reason, Refused
from tierd.service.message_socket import MessageSocket
from tierd.service.session_watch import SessionWatch, Unwatched

__all__ = ["Session"]

_MAX_UNSENT_NOTICES = 256
_PACE_SECONDS = 0.001
_PACED_EXPERTS = 16
_MOST_PACES = 4.0
_LAST_FEW = 2
_MOST_NAMED = 128
"""Experts of one message: with what is said of those that failed it stays far below the largest packet."""

_OUTCOMES = {
    Outcome.HIT: pb.OUTCOME_HIT,
    Outcome.MISS: pb.OUTCOME_MISS,
    Outcome.JOINED: pb.OUTCOME_JOINED,
}
_REASONS = {
    Reason.DATA_LOSS: pb.REASON_DATA_LOSS,
    Reason.UNAVAILABLE: pb.REASON_UNAVAILABLE,
    Reason.DEADLINE_EXCEEDED: pb.REASON_DEADLINE_EXCEEDED,
    Reason.CANCELLED: pb.REASON_CANCELLED,
}


class _Writer(Protocol):
    async def write(self, message: pb.OpenSessionResponse, /) -> None: ...


class Session:
    """Answers of the broker on their way to the node, merged while the stream is busy.

    A message costs both sides more than reading a small record does. So of what lands one by one for an acquire, the
    first answer leaves at once, the last few do, and the others in between at most once a millisecond; for the many
    experts of a prompt, once in up to four.

    They leave by the stream, or by the socket of a node that asked by it: then behind all else that the loop has to do
    at the moment, such as handing the next reads to the drives.

    Attributes:
        id: the daemon's number for it.
        name: the node's, for people.
        token: the node's proof that it is this session's, good once for attaching and once for going on with it.
        last_acquire_id: the last acquire that was taken and counted.
        packets: the node's socket; None before it was offered one.
        by_packets: an acquire came by it, so answers leave by it.
        error: why the daemon ended it, or None.
        ended: set together with `error`.
    """

    def __init__(
        self, session_id: int, name: str, tiers: dict[Outcome, int], watch: SessionWatch | None = None
    ) -> None:
        self.id = session_id
        self.name = name
        self.ended = asyncio.Event()
        self.error: TierdError | None = None
        self.token = b""
        self.last_acquire_id = 0
        self.packets: MessageSocket | None = None
        self.by_packets = False
        self._leaving = False
        self._tiers = tiers
        self._watch = watch or Unwatched()
        self._unsent: list[pb.OpenSessionResponse] = []
        self._notice: pb.Notice | None = None  # the last of what is unsent, if it is one
        self._wake = asyncio.Event()
        self._asked = 0
        self._left = 0
        self._pause = _PACE_SECONDS
        self._paced: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Session {self.id} {self.name!r}, {len(self._unsent)} unsent>"

    def asked(self, acquire_id: int, experts: int) -> None:
        """The node is about to acquire so many experts."""
        self._asked, self._left = acquire_id, experts
        self._pause = _PACE_SECONDS * min(_MOST_PACES, max(1.0, experts / _PACED_EXPERTS))
        self._end_pause()

    def answered(self, acquire_id: int, granted: list[Granted], refused: list[Refused]) -> None:
        """The broker decided some experts: they leave with the next message."""
        self._watch.answered(self.id, acquire_id, granted, refused)
        if acquire_id == self._asked:
            self._left -= len(granted) + len(refused)
            if self._left <= _LAST_FEW:
                self._end_pause()
        for g in granted:
            ready = self._room(acquire_id).ready
            ready.add(expert=g.expert, word=g.word, tier=self._tiers[g.outcome], outcome=_OUTCOMES[g.outcome])
        for r in refused:
            self._room(acquire_id).failed.add(expert=r.expert, reason=_REASONS[r.reason], detail=r.detail)

    def _room(self, acquire_id: int) -> pb.Notice:
        """The notice that has room for one more expert of the acquire."""
        notice = self._notice
        if notice is None or notice.acquire_id != acquire_id or len(notice.ready) + len(notice.failed) >= _MOST_NAMED:
            message = pb.OpenSessionResponse(notice=pb.Notice(acquire_id=acquire_id))
            self._send(message, pausing=self._paced is not None)
            notice = self._notice = message.notice
        return notice

    def drain(self, reason: str) -> None:
        """Tell the node that the daemon is stopping."""
        self._send(pb.OpenSessionResponse(draining=pb.Draining(reason=reason)))

    def end(self, error: TierdError) -> None:
        """The session is over: its life line closed, it broke a limit, or its node opened another."""
        if self.error is None:
            self.error = error
            self.ended.set()
            self._end_pause()
            self._wake.set()
            if self.packets is not None:
                self.packets.shut()

    def _begin_pause(self) -> None:
        if self._paced is None and self._left > _LAST_FEW:
            self._paced = asyncio.get_running_loop().call_later(self._pause, self._end_pause)

    def _end_pause(self) -> None:
        if self._paced is not None:
            self._paced.cancel()
            self._paced = None
            if self._unsent:
                self._go()

    def _send(self, message: pb.OpenSessionResponse, *, pausing: bool = False) -> None:
        self._unsent.append(message)
        self._notice = None
        if not pausing:
            self._go()
        if len(self._unsent) > _MAX_UNSENT_NOTICES:
            self.end(LimitExceeded(f"session {self.id} was ended: the node does not read its answers"))

    def _go(self) -> None:
        """What is unsent may leave."""
        if not self.by_packets:
            self._wake.set()
        elif not self._leaving:
            self._leaving = True
            asyncio.get_running_loop().call_soon(self._leave)

    def _leave(self) -> None:
        self._leaving = False
        batch, self._unsent, self._notice = self._unsent, [], None
        for message in batch:
            if self.packets is None or self.error is not None:
                return
            if not self.packets.send(message.SerializeToString()):
                self.end(LimitExceeded(f"session {self.id} was ended: the node does not read its answers"))
        self._begin_pause()

    async def send_all(self, stream: _Writer) -> None:
        """Write what is answered until the session is ended; a write that was begun is finished."""
        while self.error is None:
            await self._wake.wait()
            self._wake.clear()
            while self._unsent and self.error is None and not self.by_packets:
                batch, self._unsent, self._notice = self._unsent, [], None
                for message in batch:
                    if self.error is None:
                        await stream.write(message)
                        self._begin_pause()
