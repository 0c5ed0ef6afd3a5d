"""A worker: one thread that computes, and a gRPC server that brings it requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from compute_node.worker.expert_work import ExpertWork
from compute_node.worker.service import MAX_REQUESTS, Job, WorkerIdentity, WorkerService, arrays_of, phase_of
from compute_node.worker.work_queue import WorkQueue
from tierd.addresses import Address
from tierd.api import worker_pb2_grpc
from tierd.client.loop_thread import LoopThread
from tierd.door import Door
from tierd.errors import DeadlineExceeded, TierdError
from tierd.listening import Listener, Protection
from tierd.rpc import KEEPALIVE_SECONDS, MAX_MESSAGE_BYTES, server_options

__all__ = ["Worker"]

_START_SECONDS = 30.0
_STOP_SECONDS = 2.0
_LOOK_SECONDS = 0.5
_OTHER_CALLS = 64


class Worker:
    """Computes with experts for far nodes. `run` is the computing thread; `stop` ends it from anywhere.

    Args:
        address: where nodes connect.
        protection: what stands between that address and the world.
        identity: what nodes must have in common with it.
        work: computes; closed by whoever made it.
        max_nodes: nodes at once.
        tell: takes a line for operators.

    Attributes:
        address: where it listens.

    Raises:
        UsageError: the address cannot be had, or is not protected.
    """

    def __init__(
        self,
        address: Address,
        protection: Protection,
        identity: WorkerIdentity,
        work: ExpertWork,
        *,
        max_nodes: int,
        tell: Callable[[str], None],
    ) -> None:
        self.computed = self.failed = 0
        self._work = work
        self._queue: WorkQueue[Job] = WorkQueue(MAX_REQUESTS)
        self._service = WorkerService(
            identity, work, self._queue, door=Door(protection.token_file), max_nodes=max_nodes, tell=tell
        )
        self._stopping = threading.Event()
        self._loop = LoopThread.shared()
        self._listener = self._loop.run(
            self._start(address, protection, max_nodes), seconds=_START_SECONDS, what=f"listening on {address}"
        )
        self.address = self._listener.address

    def __repr__(self) -> str:
        return f"<Worker {self.address}: {len(self._service.nodes)} nodes, {len(self._queue)} requests wait>"

    def run(self) -> None:
        """Compute until `stop`."""
        while not self._stopping.is_set():
            job = self._queue.take(_LOOK_SECONDS)
            if job is not None:
                self._do(job)

    def stop(self) -> None:
        """End `run` after the request that is being computed. Safe in a signal handler: it waits for nothing."""
        self._stopping.set()

    def close(self) -> None:
        """End all streams and let others have the address."""
        self._queue.close()
        try:
            self._loop.run(self._end(), seconds=_STOP_SECONDS + 5, what="stopping the worker's server")
        finally:
            self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, job: Job) -> None:
        try:
            if time.monotonic() > job.until:
                raise DeadlineExceeded("the request waited for too long behind others")
            inputs, experts = arrays_of(job.rows, self._work)
            done = self._work.compute(job.rows.layer, inputs, experts, step=job.rows.step, phase=phase_of(job.rows))
        except TierdError as error:
            self.failed += 1
            job.reply(error)
        else:
            self.computed += 1
            job.reply(done)

    async def _start(self, address: Address, protection: Protection, max_nodes: int) -> Listener:
        options = server_options(keepalive_seconds=KEEPALIVE_SECONDS, most_received=MAX_MESSAGE_BYTES)
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=max_nodes + _OTHER_CALLS)
        listener = Listener.bind(self._server, address, protection)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._service, self._server)
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, self._server)
        await self._server.start()
        await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
        return listener

    async def _end(self) -> None:
        await self._server.stop(_STOP_SECONDS)
