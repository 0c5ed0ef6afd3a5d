"""The worker's side of the contract: who may ask, what is refused, and how answers travel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio
import numpy as np

from compute_node.worker.expert_work import ExpertWork, WorkDone
from compute_node.worker.work_queue import WorkQueue
from tierd.api import worker_pb2 as pb
from tierd.api import worker_pb2_grpc
from tierd.client.source import Phase
from tierd.door import Door
from tierd.errors import (
    DeadlineExceeded,
    LimitExceeded,
    SessionRefused,
    TierdError,
)
from tierd.rpc import CHUNK_BYTES, MAX_NAME_LENGTH, PROTOCOL, begin, status_of

__all__ = ["MAX_REQUESTS", "Job", "WorkerIdentity", "WorkerService", "arrays_of", "phase_of"]

_HELLO_SECONDS = 10.0
_STALL_SECONDS = 10.0
_DEFAULT_SECONDS = 60.0
_MAX_SECONDS = 600.0
MAX_REQUESTS = 4
"""Requests of one node that may be unanswered."""

_Context: TypeAlias = "grpc.aio.ServicerContext[pb.ComputeRequest, pb.ComputeResponse]"


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What node and worker must have in common, since it decides bits.

    Attributes:
        fingerprint: of the store.
        numerics: of the kernels.
        kernel_path: of the kernels.
    """

    fingerprint: str
    numerics: str
    kernel_path: str


@dataclass(frozen=True, slots=True)
class Job:
    """A request on its way to the computing thread, and back.

    Attributes:
        rows: the request.
        until: on the monotonic clock; later it is not worth doing.
        reply: takes the answer, on any thread.
    """

    rows: pb.Rows
    until: float
    reply: Callable[[WorkDone | TierdError], None]


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Admits nodes and passes their requests to the queue; runs on the loop.

    Args:
        identity: of this worker.
        work: knows which requests can be computed.
        queue: where they go.
        door: whom to admit.
        max_nodes: nodes at once.
        tell: takes a line for operators.
        hello_seconds: bound on the wait for a hello.
        stall_seconds: a node that takes nothing for so long is ended.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        work: ExpertWork,
        queue: WorkQueue[Job],
        *,
        door: Door,
        max_nodes: int,
        tell: Callable[[str], None],
        hello_seconds: float = _HELLO_SECONDS,
        stall_seconds: float = _STALL_SECONDS,
    ) -> None:
        self._identity = identity
        self._work = work
        self._queue = queue
        self._door = door
        self._max_nodes = max_nodes
        self._tell = tell
        self._hello_seconds = hello_seconds
        self._stall_seconds = stall_seconds
        self._next = 1
        self.nodes: dict[int, str] = {}

    async def Compute(  # type: ignore[override]  # noqa: N802, the name is the contract's
        self, request_iterator: object, context: _Context
    ) -> None:
        """One node, from its hello to its end."""
        del request_iterator
        node = 0
        try:
            self._door.check(context)
            hello = await self._hello(context)
            self._fits(hello)
            node, self._next = self._next, self._next + 1
            self.nodes[node] = hello.name
            self._tell(f"node {node} {hello.name!r} came")
            await _Stream(node, self._work, self._queue, context, self._stall_seconds).run(self._welcome())
        except TierdError as error:
            await context.abort(status_of(error), str(error))
        finally:
            self._queue.drop(node)
            if self.nodes.pop(node, None) is not None:
                self._tell(f"node {node} left")

    async def _hello(self, context: _Context) -> pb.ComputeHello:
        read = begin(context.read())
        done, _ = await asyncio.wait([read], timeout=self._hello_seconds)
        if not done:
            raise SessionRefused(f"no hello came within {self._hello_seconds:g} s")
        message: object = read.result()
        if not isinstance(message, pb.ComputeRequest) or message.WhichOneof("message") != "hello":
            raise SessionRefused("the first message to a worker must be a hello")
        return message.hello

    def _fits(self, hello: pb.ComputeHello) -> None:
        own = self._identity
        for what, theirs, ours in (
            ("speaks protocol", hello.protocol, PROTOCOL),
            ("computes with store", hello.fingerprint[:12], own.fingerprint[:12]),
            ("computes with numerics", hello.numerics[:32], own.numerics),
            ("computes with kernel path", hello.kernel_path[:32], own.kernel_path),
        ):
            if theirs != ours:
                raise SessionRefused(
                    f"the node {what} {theirs or 'none'}, this worker {ours}",
                    hint="Both must have the same, or their tokens would differ.",
                )
        if hello.fingerprint != own.fingerprint:
            raise SessionRefused("the node computes with another store than this worker")
        if len(hello.name) > MAX_NAME_LENGTH:
            raise LimitExceeded(f"the node's name is longer than {MAX_NAME_LENGTH} characters")
        if len(self.nodes) >= self._max_nodes:
            raise LimitExceeded(
                f"{self._max_nodes} nodes are connected, the most that are admitted", hint="Raise --max-nodes."
            )

    def _welcome(self) -> pb.ComputeResponse:
        own = self._identity
        return pb.ComputeResponse(
            welcome=pb.ComputeWelcome(
                protocol=PROTOCOL,
                fingerprint=own.fingerprint,
                numerics=own.numerics,
                kernel_path=own.kernel_path,
                max_rows=self._work.rows,
                max_requests=MAX_REQUESTS,
            )
        )


class _Stream:
    """An admitted node's stream: requests in, answers out."""

    def __init__(
        self, node: int, work: ExpertWork, queue: WorkQueue[Job], context: _Context, stall_seconds: float
    ) -> None:
        self._node = node
        self._work = work
        self._queue = queue
        self._context = context
        self._stall_seconds = stall_seconds
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[tuple[int, WorkDone | TierdError]] = asyncio.Queue()
        self._unanswered: set[int] = set()

    async def run(self, welcome: pb.ComputeResponse) -> None:
        """Until the node leaves.

        Raises:
            TierdError: it broke the contract, or does not take its answers.
        """
        await self._write(welcome)
        answering = asyncio.ensure_future(self._answer())
        try:
            while True:
                read = begin(self._context.read())
                waiting: list[asyncio.Future[object]] = [read, answering]  # type: ignore[list-item]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    answering.result()
                message: object = read.result()
                if not isinstance(message, pb.ComputeRequest):
                    return
                if message.WhichOneof("message") != "rows":
                    raise SessionRefused("after the hello a worker takes rows only")
                self._take(message.rows)
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    def _take(self, rows: pb.Rows) -> None:
        if rows.id in self._unanswered:
            raise LimitExceeded(f"the request {rows.id} is being computed already")
        seconds = min(rows.deadline_ms / 1000 or _DEFAULT_SECONDS, _MAX_SECONDS)
        job = Job(rows, time.monotonic() + seconds, lambda answer: self._reply(rows.id, answer))
        if len(self._unanswered) >= MAX_REQUESTS or not self._queue.put(self._node, job):
            self._answers.put_nowait((rows.id, DeadlineExceeded(f"{MAX_REQUESTS} requests are unanswered already")))
            if self._answers.qsize() > 4 * MAX_REQUESTS:
                raise LimitExceeded("the node asks on and on and does not read its answers")
            return
        self._unanswered.add(rows.id)

    def _reply(self, request_id: int, answer: WorkDone | TierdError) -> None:
        self._loop.call_soon_threadsafe(self._answers.put_nowait, (request_id, answer))

    async def _answer(self) -> None:
        while True:
            request_id, answer = await self._answers.get()
            self._unanswered.discard(request_id)
            if isinstance(answer, TierdError):
                told = pb.NotComputed(id=request_id, detail=str(answer)[:2000])
                await self._write(pb.ComputeResponse(not_computed=told))
                continue
            for part in _parts(request_id, answer):
                await self._write(pb.ComputeResponse(computed=part))

    async def _write(self, message: pb.ComputeResponse) -> None:
        write = begin(self._context.write(message))
        done, _ = await asyncio.wait([write], timeout=self._stall_seconds)
        if not done:
            raise DeadlineExceeded(f"the node took no answer for {self._stall_seconds:g} s")
        write.result()


def _parts(request_id: int, done: WorkDone) -> Iterator[pb.Computed]:
    outputs = done.outputs
    most = max(1, CHUNK_BYTES // outputs.strides[0])
    for first in range(0, len(outputs), most):
        part = pb.Computed(
            id=request_id, first=first, outputs=outputs[first : first + most].astype("<f4", copy=False).tobytes()
        )
        if first + most >= len(outputs):
            part.last = True
            part.hits, part.misses, part.joined = (done.outcomes.get(name, 0) for name in ("hit", "miss", "joined"))
        yield part


def phase_of(rows: pb.Rows) -> Phase:
    """The phase that a request names."""
    return Phase.PREFILL if rows.prefill else Phase.DECODE


def arrays_of(rows: pb.Rows, work: ExpertWork) -> tuple[np.ndarray, np.ndarray]:
    """Activations float32 [rows, H] and experts int32 [rows, top_k] of a request.

    Raises:
        LimitExceeded: other lengths than the request says.
    """
    count = rows.rows
    if len(rows.inputs) != count * work.hidden * 4 or len(rows.experts) != count * work.top_k * 4:
        raise LimitExceeded(
            f"{len(rows.inputs)} bytes of activations and {len(rows.experts)} of experts are not {count} rows of "
            f"width {work.hidden} with {work.top_k} experts"
        )
    inputs = np.frombuffer(rows.inputs, "<f4").reshape(count, work.hidden)
    return inputs, np.frombuffer(rows.experts, "<i4").reshape(count, work.top_k)
