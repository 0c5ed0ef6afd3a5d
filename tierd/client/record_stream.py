"""Experts as bytes from a daemon of another host: several calls at a time, each a stream of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

import grpc.aio

from tierd.access import Access
from tierd.addresses import Address
from tierd.api import store_pb2 as pb
from tierd.api import store_pb2_grpc
from tierd.client.loop_thread import LoopThread
from tierd.errors import DaemonUnavailable, StoreDamaged, TierdError
from tierd.requests import Phase
from tierd.rpc import error_of, read_safely

__all__ = ["Arrival", "Arrivals", "RecordStream", "Transfer"]

_OUTCOMES = frozenset({"hit", "miss", "joined"})
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A record that has come whole; its content is not checked yet.

    Attributes:
        expert: number in the layer.
        record: its bytes.
        tier: position of the daemon's tier that had it.
        outcome: how the daemon came by it: `hit`, `miss` or `joined`.
    """

    expert: int
    record: bytearray
    tier: int
    outcome: str


Arrivals: TypeAlias = SimpleQueue[Arrival | TierdError]
"""What comes, in any order; after an error the experts of that call do not come."""


_Call: TypeAlias = "grpc.aio.UnaryStreamCall[pb.ReadExpertsRequest, pb.ReadExpertsResponse]"


class Transfer:
    """Experts of one layer on their way. Runs on the loop; only `arrivals` is read by another thread."""

    def __init__(self) -> None:
        self.arrivals: Arrivals = SimpleQueue()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, stream: RecordStream, requests: Sequence[pb.ReadExpertsRequest], nbytes: int) -> None:
        """Start one call for each request; every record has `nbytes`."""
        self._tasks = [asyncio.ensure_future(self._run(stream, request, nbytes)) for request in requests]

    def cancel(self) -> None:
        """Stop what has not come."""
        for task in self._tasks:
            task.cancel()

    async def _run(self, stream: RecordStream, request: pb.ReadExpertsRequest, nbytes: int) -> None:
        try:
            await self._collect(stream, request, nbytes)
        except grpc.aio.AioRpcError as error:
            self.arrivals.put(error_of(error, str(stream.address)))
        except TierdError as error:
            self.arrivals.put(error)

    async def _collect(self, stream: RecordStream, request: pb.ReadExpertsRequest, nbytes: int) -> None:
        call = stream.call(request)
        waiting = list(request.experts)
        try:
            record = bytearray()
            while waiting:
                message = await read_safely(call)
                if not isinstance(message, pb.ReadExpertsResponse):
                    raise DaemonUnavailable(f"{stream.address} ended a transfer that lacks {len(waiting)} experts")
                record += message.data
                if (message.expert, message.total_bytes) != (waiting[0], nbytes) or len(record) > nbytes:
                    raise StoreDamaged(
                        f"{stream.address} sends {message.total_bytes} bytes of layer {request.layer} expert "
                        f"{message.expert} where expert {waiting[0]} of {nbytes} bytes was expected"
                    )
                if len(record) == nbytes:
                    outcome = message.outcome if message.outcome in _OUTCOMES else "miss"
                    self.arrivals.put(Arrival(waiting.pop(0), record, message.tier, outcome))
                    record = bytearray()
        finally:
            call.cancel()


class RecordStream:
    """A channel to a daemon, over which transfers go.

    Args:
        address: the daemon.
        access: how to reach it.
        fingerprint: of the store that it must serve.
        loop: the process's gRPC loop.
        lanes: calls at a time; several keep the link busy while one waits for a drive.
    """

    def __init__(self, address: Address, access: Access, *, fingerprint: str, loop: LoopThread, lanes: int) -> None:
        self.address = address
        self._access = access
        self._fingerprint = fingerprint
        self._loop = loop
        self._lanes = lanes
        self._channel: grpc.aio.Channel | None = None

    def ask(
        self, layer: int, experts: Sequence[int], nbytes: int, *, phase: Phase, seconds: float, repeated: bool
    ) -> Transfer:
        """Ask for experts of a layer, in the order in which they are wanted; returns at once.

        Args:
            layer: model layer number.
            experts: distinct numbers in the layer.
            nbytes: of each record.
            phase: for the daemon's counts.
            seconds: after which what has not come fails.
            repeated: they were asked for before.
        """
        lanes = [experts[lane :: self._lanes] for lane in range(min(self._lanes, len(experts)))]
        requests = [
            pb.ReadExpertsRequest(
                layer=layer,
                experts=lane,
                deadline_ms=max(1, int(seconds * 1000)),
                prefill=phase is Phase.PREFILL,
                fingerprint=self._fingerprint,
                repeated=repeated,
            )
            for lane in lanes
        ]
        transfer = Transfer()
        self._loop.call(transfer.begin, self, requests, nbytes)
        return transfer

    def give_up(self, transfer: Transfer) -> None:
        """Nobody waits for the transfer any more."""
        self._loop.call(transfer.cancel)

    def call(self, request: pb.ReadExpertsRequest) -> _Call:
        """Begin a call; on the loop only."""
        if self._channel is None:
            self._channel = self._access.channel(self.address)
        return store_pb2_grpc.StoreServiceStub(self._channel).ReadExperts(
            request, timeout=request.deadline_ms / 1000, metadata=self._access.metadata(self.address)
        )

    def close(self) -> None:
        """End all transfers and the connection."""
        self._loop.run(self._close(), seconds=_CLOSE_SECONDS, what=f"closing the connection to {self.address}")

    async def _close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
