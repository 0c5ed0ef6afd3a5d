"""Reading the store from afar: manifest, text files, dense tensors, and experts as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc.aio

from tierd.api import store_pb2 as pb
from tierd.api import store_pb2_grpc
from tierd.errors import LimitExceeded, TierdError
from tierd.rpc import CHUNK_BYTES, PROTOCOL, status_of
from tierd.service.record_reader import RecordReader
from tierd.store.store import ExpertStore

__all__ = ["StoreService"]

_MAX_NAMES = 65536
_MAX_DEADLINE_SECONDS = 600.0

_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"


class StoreService(store_pb2_grpc.StoreServiceServicer):
    """Answers from an open store; disk reads happen in a thread, never on the loop."""

    def __init__(
        self,
        store: ExpertStore,
        records: RecordReader,
        *,
        boot_id: str,
        tiers: list[str],
        slots: int,
        default_deadline: float,
    ) -> None:
        self._store = store
        self._records = records
        self._boot_id = boot_id
        self._tiers = tiers
        self._slots = slots
        self._default_deadline = default_deadline
        # One file or tensor in memory at a time, whatever clients ask for together.
        self._one_at_a_time = asyncio.Semaphore(1)

    async def Describe(  # noqa: N802, the name is the contract's
        self, request: pb.DescribeRequest, context: _Context
    ) -> pb.DescribeResponse:
        """The manifest and what the daemon adds to it."""
        del request, context
        slot_bytes = self._store.geometry.slot_bytes
        return pb.DescribeResponse(
            protocol=PROTOCOL,
            manifest=self._store.manifest.model_dump_json(),
            fingerprint=self._store.fingerprint,
            boot_id=self._boot_id,
            tiers=self._tiers,
            arena_bytes=self._slots * slot_bytes,
            slot_bytes=slot_bytes,
            slots=self._slots,
        )

    async def ReadFile(  # noqa: N802, the name is the contract's
        self, request: pb.ReadFileRequest, context: _Context
    ) -> AsyncIterator[pb.ReadFileResponse]:
        """A text file of the store in chunks."""
        try:
            async with self._one_at_a_time:
                data = await asyncio.to_thread(self._store.read_file, request.name)
                for chunk in _chunks(data):
                    yield pb.ReadFileResponse(total_bytes=len(data), data=chunk)
        except TierdError as error:
            await context.abort(status_of(error), str(error))

    async def ReadDense(  # noqa: N802, the name is the contract's
        self, request: pb.ReadDenseRequest, context: _Context
    ) -> AsyncIterator[pb.ReadDenseResponse]:
        """Dense tensors by name in chunks, each checked before its first chunk is sent."""
        try:
            if len(request.names) > _MAX_NAMES:
                raise LimitExceeded(f"more than {_MAX_NAMES} tensors in one request")
            for name in request.names:
                async with self._one_at_a_time:
                    data = await asyncio.to_thread(self._store.read_dense_bytes, name)
                    for chunk in _chunks(data):
                        yield pb.ReadDenseResponse(name=name, total_bytes=len(data), data=chunk)
        except TierdError as error:
            await context.abort(status_of(error), str(error))

    async def ReadExperts(  # noqa: N802, the name is the contract's
        self, request: pb.ReadExpertsRequest, context: _Context
    ) -> AsyncIterator[pb.ReadExpertsResponse]:
        """Experts' records in chunks, through the arena like everybody else's."""
        seconds = request.deadline_ms / 1000 if request.deadline_ms else self._default_deadline
        deadline = asyncio.get_running_loop().time() + min(seconds, _MAX_DEADLINE_SECONDS)
        try:
            if len(request.experts) > self._store.geometry.experts_total:
                raise LimitExceeded(f"{len(request.experts)} experts asked for; the store has fewer")
            with self._records.session() as session:
                for expert in request.experts:
                    record = await session.read(request.layer, expert, deadline)
                    place = self._store.location(request.layer, expert)
                    for chunk in _chunks(record):
                        yield pb.ReadExpertsResponse(
                            expert=expert, total_bytes=len(record), xxh3=place.xxh3, data=chunk
                        )
        except TierdError as error:
            await context.abort(status_of(error), str(error))


def _chunks(data: bytes) -> list[bytes]:
    view = memoryview(data)
    return [bytes(view[start : start + CHUNK_BYTES]) for start in range(0, max(len(data), 1), CHUNK_BYTES)]
