"""Admits compute nodes and passes their messages to the broker: the handler of the session stream."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from tierd.api import session_pb2 as pb
from tierd.api import session_pb2_grpc
from tierd.broker.broker import Broker
from tierd.door import OPEN_DOOR, Door
from tierd.errors import DaemonUnavailable, LimitExceeded, SessionRefused, TierdError
from tierd.prefetch.hint import Hint
from tierd.requests import AcquireRequest, Outcome, Phase
from tierd.rpc import MAX_NAME_LENGTH, PROTOCOL, begin, status_of
from tierd.service.message_socket import MessageSocket
from tierd.service.session import Session
from tierd.service.session_watch import SessionWatch, Unwatched

__all__ = ["Attacher", "SessionService"]

_Context: TypeAlias = "grpc.aio.ServicerContext[pb.OpenSessionRequest, pb.OpenSessionResponse]"

_log = structlog.get_logger()

_HELLO_SECONDS = 10.0
_MAX_HINTED = 4096
_MAX_SAID = 64
_MAX_DEADLINE_SECONDS = 3600.0
# Sessions that ended, remembered for nodes that come back.
_MAX_REMEMBERED = 1024

_PHASES = {pb.PHASE_PREFILL: Phase.PREFILL, pb.PHASE_DECODE: Phase.DECODE, pb.PHASE_UNSPECIFIED: Phase.DECODE}


def _ended(message: object) -> bool:
    """Whether the node closed its side of the stream."""
    return message is grpc.aio.EOF


def _hint(hint: pb.Hint) -> Hint:
    return Hint(
        step=hint.step,
        layer=hint.layer,
        experts=tuple(islice(hint.experts, _MAX_HINTED)),
        probabilities=tuple(islice(hint.probabilities, _MAX_HINTED)),
        lead=hint.lead_us / 1e6,
    )


class Attacher(Protocol):
    """Hands over the arena's descriptors, outside gRPC."""

    path: str
    unasked_reads: bool

    def offer(self, session_id: int) -> bytes:
        """A token that lets the session's node attach once, within a few seconds."""

    def attached(self, session_id: int) -> bool:
        """Whether the session's node holds the arena's descriptors now."""

    def messages(self, session_id: int) -> MessageSocket:
        """The socket for messages of a session that was offered something."""

    def left(self, session_id: int) -> None:
        """The session's stream ended; what was offered and never taken goes."""


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """Admits nodes, passes their messages to the broker, and ends everything of theirs when they leave."""

    def __init__(
        self,
        *,
        broker: Broker,
        attacher: Attacher,
        fingerprint: str,
        boot_id: str,
        tiers: list[str],
        drive_tier: int,
        max_sessions: int,
        default_deadline: float,
        hello_seconds: float = _HELLO_SECONDS,
        watch: SessionWatch | None = None,
        door: Door = OPEN_DOOR,
    ) -> None:
        self._broker = broker
        self._attacher = attacher
        self._fingerprint = fingerprint
        self._boot_id = boot_id
        self._tier_names = tiers
        self._tiers = {Outcome.HIT: 0, Outcome.MISS: drive_tier, Outcome.JOINED: drive_tier}
        self._max_sessions = max_sessions
        self._default_deadline = default_deadline
        self._hello_seconds = hello_seconds
        self._watch = watch or Unwatched()
        self._door = door
        self._next_id = 1
        self._draining = False
        self.sessions: dict[int, Session] = {}
        self._ended: OrderedDict[bytes, int] = OrderedDict()

    async def OpenSession(  # type: ignore[override]  # noqa: N802, the name is the contract's
        self, request_iterator: object, context: _Context
    ) -> None:
        """One node, from its hello to its end."""
        del request_iterator
        try:
            self._door.check(context)
            session = self._admit(hello := await self._hello(context))
        except TierdError as error:
            await context.abort(status_of(error), str(error))
        _log.info("session opened", session=session.id, name=session.name)
        sender: asyncio.Future[None] | None = None
        try:
            await context.write(self._welcome(session, hello.resumes))
            sender = asyncio.ensure_future(session.send_all(context))
            await self._serve(session, context)
        except TierdError as error:
            session.end(error)
            self._leave(session)
            if sender is not None:
                # The status can only follow a write that was begun. If the node never reads, its own end ends this.
                await asyncio.wait([sender])
            await context.abort(status_of(error), str(error))
        finally:
            self._leave(session)
            if sender is not None:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)

    async def _hello(self, context: _Context) -> pb.Hello:
        read = begin(context.read())
        done, _ = await asyncio.wait([read], timeout=self._hello_seconds)
        if not done:
            raise SessionRefused(f"no hello came within {self._hello_seconds:g} s")
        message = read.result()
        if _ended(message) or message.WhichOneof("message") != "hello":
            raise SessionRefused("the first message of a session must be a hello")
        return message.hello

    def _admit(self, hello: pb.Hello) -> Session:
        if hello.protocol != PROTOCOL:
            raise SessionRefused(
                f"the node speaks protocol {hello.protocol}, this daemon {PROTOCOL}",
                hint="Update the older of the two.",
            )
        if hello.fingerprint and hello.fingerprint != self._fingerprint:
            raise SessionRefused(
                f"the node has dense weights of store {hello.fingerprint[:12]}, "
                f"this daemon serves {self._fingerprint[:12]}",
                hint="Point the node at the daemon of its own store.",
            )
        if len(hello.name) > MAX_NAME_LENGTH:
            raise LimitExceeded(f"the node's name is longer than {MAX_NAME_LENGTH} characters")
        if self._draining:
            raise DaemonUnavailable("the daemon is stopping")
        if len(self.sessions) >= self._max_sessions:
            raise LimitExceeded(
                f"{self._max_sessions} nodes are connected, the most that are admitted", hint="Raise --max-sessions."
            )
        session = Session(self._next_id, hello.name, self._tiers, self._watch)
        self._next_id += 1
        self.sessions[session.id] = session
        self._broker.open_session(session.id, session)
        self._watch.opened(session.id, hello.name)
        return session

    def _welcome(self, session: Session, resumes: bytes) -> pb.OpenSessionResponse:
        session.token = self._attacher.offer(session.id)
        session.packets = self._attacher.messages(session.id)
        session.packets.listen(partial(self._heard, session))
        return pb.OpenSessionResponse(
            welcome=pb.Welcome(
                protocol=PROTOCOL,
                fingerprint=self._fingerprint,
                boot_id=self._boot_id,
                session_id=session.id,
                attach_path=self._attacher.path,
                attach_token=session.token,
                max_experts_per_acquire=self._broker.max_experts_per_acquire,
                tiers=self._tier_names,
                last_acquire_id=self._resume(resumes),
                unasked_reads=self._attacher.unasked_reads,
                packet_messages=True,
            )
        )

    def _resume(self, token: bytes) -> int:
        """The last acquire that was counted for the session with that token, which is over now if it was not."""
        if not token:
            return 0
        old = next((s for s in self.sessions.values() if s.token == token), None)
        if old is None:
            return self._ended.get(token, 0)
        old.end(DaemonUnavailable("the node went on with another session"))
        return old.last_acquire_id

    async def _serve(self, session: Session, context: _Context) -> None:
        ended = asyncio.ensure_future(session.ended.wait())
        try:
            while True:
                read = begin(context.read())
                waiting: list[asyncio.Future[Any]] = [read, ended]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if session.error is not None:
                    raise session.error
                message = read.result()
                if _ended(message):
                    return
                self._handle(session, message)
        finally:
            ended.cancel()

    def _heard(self, session: Session, packet: bytes | None) -> None:
        """A packet came by the session's socket; None is one that is too large."""
        if session.error is not None:
            return
        try:
            if packet is None:
                raise LimitExceeded(f"session {session.id} was ended: a packet is larger than a message can be")
            message = pb.OpenSessionRequest.FromString(packet)
            session.by_packets = session.by_packets or message.WhichOneof("message") == "acquire"
            self._handle(session, message)
        except DecodeError:
            session.end(SessionRefused(f"session {session.id} was ended: a packet is no message"))
        except TierdError as error:
            session.end(error)

    def _handle(self, session: Session, message: pb.OpenSessionRequest) -> None:
        match message.WhichOneof("message"):
            case "acquire":
                request = self._request(message.acquire)
                self._watch.asked(session.id, request)
                session.asked(request.id, len(request.experts))
                self._broker.acquire(session.id, request)
                session.last_acquire_id = request.id
            case "release":
                self._broker.release(session.id, message.release.acquire_id)
            case "cancel":
                self._broker.cancel(session.id, message.cancel.acquire_id)
            case "hint":
                # An absurd hint is cut to size and costs nothing: hints never end a session.
                hint = _hint(message.hint)
                self._watch.hinted(session.id, hint.layer, len(hint.experts))
                self._broker.hint(session.id, hint)
            case "step":
                self._broker.said(session.id, message.step.step, message.step.tokens[:_MAX_SAID])
            case other:
                raise SessionRefused(f"a session cannot take the message {other!r} now")

    def _request(self, acquire: pb.Acquire) -> AcquireRequest:
        deadline = acquire.deadline_ms / 1000 if acquire.deadline_ms else self._default_deadline
        return AcquireRequest(
            id=acquire.id,
            layer=acquire.layer,
            experts=tuple(acquire.experts),
            phase=_PHASES.get(acquire.phase, Phase.DECODE),
            deadline=min(deadline, _MAX_DEADLINE_SECONDS),
            repeated=acquire.repeated,
            resident=tuple(acquire.resident),
            step=acquire.step,
        )

    def _leave(self, session: Session) -> None:
        self._broker.close_session(session.id)
        if self.sessions.pop(session.id, None) is not None:
            self._ended[session.token] = session.last_acquire_id
            if len(self._ended) > _MAX_REMEMBERED:
                self._ended.popitem(last=False)
            if session.packets is not None:
                session.packets.shut()
            self._attacher.left(session.id)
            why = session.error.message if session.error is not None else "the node left"
            self._watch.closed(session.id, why)
            _log.info("session closed", session=session.id, name=session.name, why=why)

    @property
    def connected_and_admitted(self) -> tuple[int, int]:
        """Nodes that are connected, and nodes that were admitted since the start."""
        return len(self.sessions), self._next_id - 1

    def end_sessions(self, session_ids: Iterable[int], why: str) -> None:
        """End sessions whose nodes are well; they come back with another one."""
        for session_id in session_ids:
            session = self.sessions.get(session_id)
            if session is not None:
                self._broker.close_session(session_id)
                session.end(DaemonUnavailable(why))

    def node_died(self, session_id: int) -> None:
        """The life line closed: the process is gone, whatever its stream still says."""
        session = self.sessions.get(session_id)
        if session is not None:
            self._broker.close_session(session_id)
            session.end(DaemonUnavailable("its life line closed"))

    def drain(self, reason: str) -> None:
        """Admit nobody new, and tell everyone."""
        self._draining = True
        for session in self.sessions.values():
            session.drain(reason)
