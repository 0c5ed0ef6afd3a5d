"""A node's end of one worker's stream, opened again with growing pauses. All of it runs on the loop."""

from __future__ import annotations

import asyncio
from queue import SimpleQueue
from typing import TypeAlias

import grpc.aio

from tierd.access import Access
from tierd.addresses import Address
from tierd.api import worker_pb2 as pb
from tierd.api import worker_pb2_grpc
from tierd.errors import DaemonUnavailable, TierdError, UsageError
from tierd.rpc import error_of, read_safely

__all__ = ["Answers", "WorkerLink"]

Answers: TypeAlias = SimpleQueue[tuple[int, "pb.ComputeResponse | TierdError"]]
"""Number of a worker and what came from it; an error: its stream has ended, and all that it was asked for is lost."""

_HELLO_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_MAX_RETRY_SECONDS = 10.0

_Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.ComputeRequest, pb.ComputeResponse]"


class WorkerLink:
    """One worker.

    Args:
        number: of the worker, for `answers`.
        address: of the worker.
        hello: said at every beginning.
        access: how to reach it.
        answers: where everything goes that it sends.

    Attributes:
        welcome: the worker's answer to the hello, while it is connected.
        trouble: why it is not.
        refused: it will not be tried again: the two do not fit together.
    """

    def __init__(self, number: int, address: Address, hello: pb.ComputeHello, access: Access, answers: Answers) -> None:
        self.address = address
        self.welcome: pb.ComputeWelcome | None = None
        self.trouble: TierdError | None = None
        self.refused = False
        self._number = number
        self._hello = hello
        self._access = access
        self._answers = answers
        self._outgoing: asyncio.Queue[pb.ComputeRequest] = asyncio.Queue()
        self._tried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "connected" if self.welcome is not None else "refused" if self.refused else "away"
        return f"<WorkerLink {self.address}, {state}>"

    async def start(self) -> None:
        """Begin to connect; returns when the first try has succeeded or failed."""
        self._task = asyncio.ensure_future(self._keep())
        await self._tried.wait()

    def send(self, request: pb.ComputeRequest) -> None:
        """Queue a request; what is queued when the stream ends is lost with it."""
        self._outgoing.put_nowait(request)

    async def close(self) -> None:
        """End the stream."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        pause = _RETRY_SECONDS
        while not self.refused:
            try:
                await self._session()
            except grpc.aio.AioRpcError as error:
                self.trouble = error_of(error, f"the worker at {self.address}")
            except TierdError as error:
                self.trouble = error
            except (TimeoutError, asyncio.InvalidStateError):
                self.trouble = DaemonUnavailable(f"the worker at {self.address} did not answer the hello")
            was_connected, self.welcome = self.welcome is not None, None
            assert self.trouble is not None
            # What it does not understand it will not understand next time.
            self.refused = isinstance(self.trouble, UsageError)
            self._outgoing = asyncio.Queue()
            if was_connected:
                self._answers.put((self._number, self.trouble))
            self._tried.set()
            pause = _RETRY_SECONDS if was_connected else min(2 * pause, _MAX_RETRY_SECONDS)
            await asyncio.sleep(pause)

    async def _session(self) -> None:
        """One stream, from its hello to its end; always ends by an error."""
        address = self.address.now()
        async with self._access.channel(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            call = stub.Compute(metadata=self._access.metadata(address))
            writing: asyncio.Task[None] | None = None
            try:
                async with asyncio.timeout(_HELLO_SECONDS):
                    await call.write(pb.ComputeRequest(hello=self._hello))
                    answer = await self._read(call)
                if answer.WhichOneof("message") != "welcome":
                    raise DaemonUnavailable(f"the worker at {self.address} did not say welcome")
                self.welcome = answer.welcome
                self._tried.set()
                writing = asyncio.ensure_future(self._write(call, self._outgoing))
                while True:
                    self._answers.put((self._number, await self._read(call)))
            finally:
                if writing is not None:
                    writing.cancel()
                    await asyncio.gather(writing, return_exceptions=True)
                call.cancel()

    async def _read(self, call: _Call) -> pb.ComputeResponse:
        message: object = await read_safely(call)
        if not isinstance(message, pb.ComputeResponse):
            raise DaemonUnavailable(f"the worker at {self.address} ended the stream")
        return message

    @staticmethod
    async def _write(call: _Call, outgoing: asyncio.Queue[pb.ComputeRequest]) -> None:
        while True:
            request = await outgoing.get()
            try:
                await call.write(request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader learns why the stream ended
