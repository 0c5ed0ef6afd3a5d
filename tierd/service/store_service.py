"""Reading the store from afar: manifest, text files, dense tensors, and experts as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import cached_property
from typing import TypeAlias

import grpc.aio

from tierd.api import store_pb2 as pb
from tierd.api import store_pb2_grpc
from tierd.door import OPEN_DOOR, Door
from tierd.errors import DeadlineExceeded, LimitExceeded, SessionRefused, TierdError
from tierd.requests import Outcome, Phase
from tierd.rpc import CHUNK_BYTES, PROTOCOL, begin, status_of
from tierd.service.budget import TRANSFERS
from tierd.service.record_reader import RecordReader
from tierd.store.index import encode_index
from tierd.store.store import ExpertStore

__all__ = ["StoreService"]

_MAX_NAMES = 65536
# Place of the drive among the tiers; RAM comes first.
_DRIVE = 1
_MAX_DEADLINE_SECONDS = 600.0
# A client that takes nothing for so long gives its place to the next.
_STALL_SECONDS = 10.0

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
        slots: Callable[[], int],
        default_deadline: float,
        stall_seconds: float = _STALL_SECONDS,
        door: Door = OPEN_DOOR,
    ) -> None:
        self._store = store
        self._records = records
        self._boot_id = boot_id
        self._tiers = tiers
        self._slots = slots
        self._default_deadline = default_deadline
        self._stall_seconds = stall_seconds
        self._door = door
        # So many files, tensors or records in memory at a time, whatever clients ask for together.
        self._transfers = asyncio.Semaphore(TRANSFERS)

    @cached_property
    def _manifest(self) -> str:
        return self._store.manifest.model_dump_json()

    async def Describe(  # noqa: N802, the name is the contract's
        self, request: pb.DescribeRequest, context: _Context
    ) -> pb.DescribeResponse:
        """The manifest and what the daemon adds to it."""
        del request
        try:
            self._door.check(context)
        except TierdError as error:
            await context.abort(status_of(error), str(error))
        slot_bytes, slots = self._store.geometry.slot_bytes, self._slots()
        return pb.DescribeResponse(
            protocol=PROTOCOL,
            manifest=self._manifest,
            fingerprint=self._store.fingerprint,
            boot_id=self._boot_id,
            tiers=self._tiers,
            arena_bytes=slots * slot_bytes,
            slot_bytes=slot_bytes,
            slots=slots,
        )

    async def ReadFile(  # type: ignore[override]  # noqa: N802, the name is the contract's
        self, request: pb.ReadFileRequest, context: _Context
    ) -> None:
        """A text file of the store in chunks."""
        await self._answer(context, self._file(request))

    async def ReadIndex(  # type: ignore[override]  # noqa: N802, the name is the contract's
        self, request: pb.ReadIndexRequest, context: _Context
    ) -> None:
        """The index in chunks."""
        del request
        await self._answer(context, self._index())

    async def ReadDense(  # type: ignore[override]  # noqa: N802, the name is the contract's
        self, request: pb.ReadDenseRequest, context: _Context
    ) -> None:
        """Dense tensors by name in chunks, each checked before its first chunk is sent."""
        await self._answer(context, self._dense(request))

    async def ReadExperts(  # type: ignore[override]  # noqa: N802, the name is the contract's
        self, request: pb.ReadExpertsRequest, context: _Context
    ) -> None:
        """Experts' records in chunks, through the arena like everybody else's."""
        await self._answer(context, self._experts(request))

    async def _file(self, request: pb.ReadFileRequest) -> AsyncGenerator[pb.ReadFileResponse]:
        async with self._transfers:
            data = await asyncio.to_thread(self._store.read_file, request.name)
            for chunk in _chunks(data):
                yield pb.ReadFileResponse(total_bytes=len(data), data=chunk)

    async def _index(self) -> AsyncGenerator[pb.ReadIndexResponse]:
        async with self._transfers:
            data = await asyncio.to_thread(encode_index, self._store.index)
            for chunk in _chunks(data):
                yield pb.ReadIndexResponse(total_bytes=len(data), data=chunk)

    async def _dense(self, request: pb.ReadDenseRequest) -> AsyncGenerator[pb.ReadDenseResponse]:
        if len(request.names) > _MAX_NAMES:
            raise LimitExceeded(f"more than {_MAX_NAMES} tensors in one request")
        for name in request.names:
            async with self._transfers:
                data = await asyncio.to_thread(self._store.read_dense_bytes, name)
                for chunk in _chunks(data):
                    yield pb.ReadDenseResponse(name=name, total_bytes=len(data), data=chunk)
                del data, chunk  # before others get this place

    async def _experts(self, request: pb.ReadExpertsRequest) -> AsyncGenerator[pb.ReadExpertsResponse]:
        seconds = request.deadline_ms / 1000 if request.deadline_ms else self._default_deadline
        deadline = asyncio.get_running_loop().time() + min(seconds, _MAX_DEADLINE_SECONDS)
        if len(request.experts) > self._store.geometry.experts_total:
            raise LimitExceeded(f"{len(request.experts)} experts asked for; the store has fewer")
        if request.fingerprint not in ("", self._store.fingerprint):
            raise SessionRefused(
                f"the node computes with store {request.fingerprint[:12]}, this daemon serves "
                f"{self._store.fingerprint[:12]}",
                hint="Point the node at the daemon of its own store.",
            )
        phase = Phase.PREFILL if request.prefill else Phase.DECODE
        with self._records.session() as session:
            for expert in request.experts:
                async with self._transfers:
                    data, outcome = await session.read(
                        request.layer, expert, deadline, phase=phase, repeated=request.repeated
                    )
                    about = pb.ReadExpertsResponse(
                        expert=expert,
                        total_bytes=len(data),
                        xxh3=self._store.location(request.layer, expert).xxh3,
                        outcome=outcome.value,
                        tier=0 if outcome is Outcome.HIT else _DRIVE,
                    )
                    for chunk in _chunks(data):
                        message = pb.ReadExpertsResponse(data=chunk)
                        message.MergeFrom(about)
                        yield message
                    del data, chunk, message  # before others get this place

    async def _answer(self, context: _Context, chunks: AsyncGenerator[object]) -> None:
        """Write the chunks; a client that does not take them loses its place, and what it was to get."""
        try:
            self._door.check(context)
            async with aclosing(chunks):
                async for chunk in chunks:
                    write = begin(context.write(chunk))
                    del chunk  # a caller that waits for its next turn keeps nothing of the last one
                    done, _ = await asyncio.wait([write], timeout=self._stall_seconds)
                    if not done:
                        break
                    write.result()
                else:
                    return
            # One chunk is left in the stream: only when it went can a status follow, unless the client ends the call.
            await write
            raise DeadlineExceeded(f"the client took no chunk for {self._stall_seconds:g} s")
        except TierdError as error:
            await context.abort(status_of(error), str(error))


def _chunks(data: bytes | bytearray | memoryview) -> Iterator[bytes]:
    view = memoryview(data)
    return (bytes(view[start : start + CHUNK_BYTES]) for start in range(0, max(len(data), 1), CHUNK_BYTES))
