"""A session stream in the hands of a test: every message is sent and read by hand, right or wrong."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio
from daemons import on_loop

from tierd.api import session_pb2 as pb
from tierd.api import session_pb2_grpc
from tierd.rpc import CHANNEL_OPTIONS, PROTOCOL, read_safely


class RawSession:
    """Synchronous calls on a stream that lives on the process's gRPC loop."""

    def __init__(self, address, options=()):
        on_loop(self._open(address.target, options))
        self.acquires = 0

    async def _open(self, target, options):
        self.channel = grpc.aio.insecure_channel(target, options=[*CHANNEL_OPTIONS, *options])
        self.call = session_pb2_grpc.SessionServiceStub(self.channel).OpenSession()

    def send(self, **message):
        """Send one message, such as `acquire=pb.Acquire(…)`; quietly does nothing on an ended stream."""

        async def write():
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self.call.write(pb.OpenSessionRequest(**message))

        on_loop(write())

    def flood(self, messages, seconds=60.0):
        """Write messages one after the other and read nothing; returns when all went or the stream ended."""

        async def write():
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for message in messages:
                    await self.call.write(message)

        on_loop(write(), seconds)

    def read(self, seconds=60.0):
        """The next message; fails if the stream ended."""
        message = on_loop(read_safely(self.call), seconds)
        assert message is not grpc.aio.EOF
        return message

    def hello(self, **fields):
        """Say hello and return the welcome."""
        self.send(hello=pb.Hello(**{"protocol": PROTOCOL, "name": "test"} | fields))
        return self.read().welcome

    def acquire(self, layer, experts, **fields):
        """Ask for experts; returns the acquire's number."""
        self.acquires += 1
        self.send(acquire=pb.Acquire(id=self.acquires, layer=layer, experts=experts, **fields))
        return self.acquires

    def answers(self, count, seconds=60.0):
        """Read notices until `count` experts are decided; returns (ready, failed) by expert."""
        ready, failed = {}, {}
        while len(ready) + len(failed) < count:
            notice = self.read(seconds).notice
            ready |= {r.expert: r for r in notice.ready}
            failed |= {f.expert: f for f in notice.failed}
        return ready, failed

    def status(self, seconds=60.0):
        """How the daemon ended the stream: status code and message."""

        async def drain():
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await read_safely(self.call) is not grpc.aio.EOF:
                    pass
            return await self.call.code(), await self.call.details()

        return on_loop(drain(), seconds)

    def close(self):
        async def end():
            self.call.cancel()
            await self.channel.close()

        on_loop(end())
