"""The node's end of a session's stream. All of it runs on the loop; only `inbox` is read by another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final, TypeAlias

import grpc.aio

from tierd.access import LOCAL_ACCESS, Access
from tierd.addresses import Address
from tierd.api import session_pb2 as pb
from tierd.api import session_pb2_grpc
from tierd.errors import DaemonUnavailable, TierdError
from tierd.rpc import PROTOCOL, error_of, read_safely

__all__ = ["IDLE_RELEASE_SECONDS", "Inbox", "SessionLink", "SessionLost"]

Inbox: TypeAlias = SimpleQueue[pb.Notice | TierdError]
"""Answers in order; an error is the last thing that comes: the stream has ended."""

IDLE_RELEASE_SECONDS: Final = 0.01
"""A node that computes for longer than this without asking again gives its grants back."""

_Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.OpenSessionRequest, pb.OpenSessionResponse]"


class SessionLost(Exception):
    """The session ended under an acquire of these experts, or (None) before it was sent."""

    def __init__(self, why: TierdError, acquire_id: int | None = None, wave: Sequence[int] = ()) -> None:
        super().__init__(why.message)
        self.why = why
        self.acquire_id = acquire_id
        self.wave = wave


class SessionLink:
    """One session: a channel, its stream, and the tasks that read and write it.

    Attributes:
        welcome: the daemon's answer to the hello.
        inbox: what the daemon sent, for one other thread.
        sent: messages written to the stream since the hello.
        lost: why the stream has ended, once it has.
        ended: called on the loop when it has.
    """

    def __init__(self, channel: grpc.aio.Channel, call: _Call, welcome: pb.Welcome, peer: str) -> None:
        self.welcome = welcome
        self.inbox: Inbox = SimpleQueue()
        self.sent = 0
        self.lost: TierdError | None = None
        self.ended: Callable[[], object] = lambda: None
        self._channel = channel
        self._call = call
        self._peer = peer
        self._outgoing: asyncio.Queue[pb.OpenSessionRequest] = asyncio.Queue()
        self._idle: asyncio.TimerHandle | None = None
        self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())]

    @classmethod
    async def open(
        cls, address: Address, hello: pb.Hello, *, seconds: float, access: Access = LOCAL_ACCESS
    ) -> SessionLink:
        """Connect, say hello, and take the welcome.

        Raises:
            DaemonUnavailable: nobody answers.
            AccessDenied: the daemon wants another token.
            SessionRefused: the daemon serves another store, or speaks another protocol.
            LimitExceeded: the daemon is full.
        """
        channel = access.channel(address)
        try:
            async with asyncio.timeout(seconds):
                call, welcome = await _greet(channel, hello, str(address), access.metadata(address))
        except grpc.aio.AioRpcError as error:
            await channel.close()
            raise error_of(error, str(address)) from error
        except (TimeoutError, asyncio.InvalidStateError) as error:
            await channel.close()
            raise DaemonUnavailable(f"{address} did not answer within {seconds:g} s") from error
        except BaseException:
            await channel.close()
            raise
        return cls(channel, call, welcome, str(address))

    def send(self, message: pb.OpenSessionRequest) -> None:
        """Queue a message for the daemon."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self._outgoing.put_nowait(message)

    def mention(self, message: pb.OpenSessionRequest) -> None:
        """Queue a message that changes nothing of what the session holds."""
        self._outgoing.put_nowait(message)

    def release_when_idle(self, acquire_id: int) -> None:
        """Give the acquire's grants back soon, unless the next acquire does so first."""
        release = pb.OpenSessionRequest(release=pb.Release(acquire_id=acquire_id))
        self._idle = asyncio.get_running_loop().call_later(IDLE_RELEASE_SECONDS, self._outgoing.put_nowait, release)

    async def close(self) -> None:
        """End the session; harmless when it has ended."""
        if self._idle is not None:
            self._idle.cancel()
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _read(self) -> None:
        message: object
        try:
            while True:
                message = await read_safely(self._call)
                if not isinstance(message, pb.OpenSessionResponse):
                    self._end(DaemonUnavailable(f"{self._peer} ended the session"))
                    return
                if message.WhichOneof("message") == "notice":
                    self.inbox.put(message.notice)
        except grpc.aio.AioRpcError as error:
            self._end(error_of(error, self._peer))
        except asyncio.CancelledError:
            self._end(DaemonUnavailable(f"the session with {self._peer} was closed"))
            raise

    def _end(self, error: TierdError) -> None:
        self.lost = error
        self.inbox.put(error)
        self.ended()

    async def _write(self) -> None:
        while True:
            message = await self._outgoing.get()
            try:
                await self._call.write(message)
                self.sent += 1
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader reports why the stream ended


async def _greet(
    channel: grpc.aio.Channel, hello: pb.Hello, peer: str, metadata: tuple[tuple[str, str], ...]
) -> tuple[_Call, pb.Welcome]:
    call = session_pb2_grpc.SessionServiceStub(channel).OpenSession(metadata=metadata)
    await call.write(pb.OpenSessionRequest(hello=hello))
    answer: object = await read_safely(call)
    if not isinstance(answer, pb.OpenSessionResponse) or answer.WhichOneof("message") != "welcome":
        raise DaemonUnavailable(f"{peer} closed the session before its welcome")
    if answer.welcome.protocol != PROTOCOL:
        raise DaemonUnavailable(f"{peer} speaks protocol {answer.welcome.protocol}, this node {PROTOCOL}")
    return call, answer.welcome
