"""What operators ask of the daemon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio

from tierd.api import admin_pb2 as pb
from tierd.api import admin_pb2_grpc
from tierd.errors import TierdError
from tierd.rpc import CHUNK_BYTES, status_of
from tierd.service.drives import Drives
from tierd.service.ram import RamKeeper
from tierd.service.remembering import Remembering
from tierd.service.scrubbing import DEFAULT_RATE, Scrubber, ScrubFinding, ScrubState
from tierd.service.statistics import drive_statistics

__all__ = ["AdminService"]

_FINDINGS_PER_MESSAGE = 1000

_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Statistics, a graceful stop, drives that come and go, and reading them all again."""

    def __init__(
        self,
        stats: Callable[[], pb.GetStatsResponse],
        stop: Callable[[float | None], None],
        drives: Drives,
        scrubber: Scrubber,
        ram: RamKeeper,
        remembering: Remembering,
        dump: Callable[[float], Callable[[], bytes]],
    ) -> None:
        self._stats = stats
        self._scrubber = scrubber
        self._ram = ram
        self._remembering = remembering
        self._stop = stop
        self._dump = dump
        self._drives = drives

    async def GetStats(  # noqa: N802, the name is the contract's
        self, request: pb.GetStatsRequest, context: _Context
    ) -> pb.GetStatsResponse:
        """The counters as they are now."""
        del request, context
        return self._stats()

    async def Drain(  # noqa: N802, the name is the contract's
        self, request: pb.DrainRequest, context: _Context
    ) -> pb.DrainResponse:
        """Answer what is in flight, refuse what is new, then exit; returns at once."""
        del context
        self._stop(request.deadline_ms / 1000 if request.deadline_ms else None)
        return pb.DrainResponse()

    async def AddMirror(  # noqa: N802, the name is the contract's
        self, request: pb.AddMirrorRequest, context: _Context
    ) -> pb.AddMirrorResponse:
        """Admit the copies in a directory and read from them from now on."""
        await _require_unix(context)
        try:
            info = await self._drives.add(Path(request.directory), request.weight or 1.0)
        except TierdError as error:
            await context.abort(status_of(error), str(error))
        return pb.AddMirrorResponse(drive=drive_statistics(self._drives, info))

    async def RemoveMirror(  # noqa: N802, the name is the contract's
        self, request: pb.RemoveMirrorRequest, context: _Context
    ) -> pb.RemoveMirrorResponse:
        """Take a drive away; returns when its last read has returned."""
        await _require_unix(context)
        try:
            info = await self._drives.remove(request.name)
        except TierdError as error:
            await context.abort(status_of(error), str(error))
        return pb.RemoveMirrorResponse(name=info.name)

    async def SetRam(  # noqa: N802, the name is the contract's
        self, request: pb.SetRamRequest, context: _Context
    ) -> pb.SetRamResponse:
        """Make the arena smaller or larger."""
        try:
            resized = await self._ram.set_ram(request.ram)
        except TierdError as error:
            await context.abort(status_of(error), str(error))
        size = resized.size
        return pb.SetRamResponse(
            ram_bytes=size.ram,
            slots=size.slots,
            slots_before=resized.slots_before,
            arena_bytes=size.slots * self._ram.slot_bytes,
            settled=resized.settled,
            excess_bytes=resized.excess_bytes,
            lines=size.lines,
        )

    async def Pin(  # noqa: N802, the name is the contract's
        self, request: pb.PinRequest, context: _Context
    ) -> pb.PinResponse:
        """Keep experts in RAM, or leave them to the policy again."""
        try:
            pinned = self._remembering.pin(request.layer, request.experts, pinned=not request.unpin)
        except TierdError as error:
            await context.abort(status_of(error), str(error))
        return pb.PinResponse(pinned=pinned)

    async def Scrub(  # noqa: N802, the name is the contract's
        self, request: pb.ScrubRequest, context: _Context
    ) -> AsyncIterator[pb.ScrubResponse]:
        """Read all copies again while the call lasts; only over a Unix socket, whose user may have the drives' time."""
        await _require_unix(context)
        told = 0
        try:
            async with contextlib.aclosing(self._scrubber.run(request.bytes_per_second or DEFAULT_RATE)) as states:
                async for state in states:
                    last = False
                    while not last:
                        fresh = state.findings[told : told + _FINDINGS_PER_MESSAGE]
                        told += len(fresh)
                        last = told == len(state.findings)
                        yield _progress(state, fresh, done=state.done and last)
        except TierdError as error:
            await context.abort(status_of(error), str(error))

    async def Dump(  # noqa: N802, the name is the contract's
        self, request: pb.DumpRequest, context: _Context
    ) -> AsyncIterator[pb.DumpResponse]:
        """What happened in the last seconds."""
        del context
        trace = await asyncio.to_thread(self._dump(request.seconds))
        for start in range(0, len(trace), CHUNK_BYTES):
            yield pb.DumpResponse(piece=trace[start : start + CHUNK_BYTES])


def _progress(state: ScrubState, fresh: list[ScrubFinding], *, done: bool) -> pb.ScrubResponse:
    return pb.ScrubResponse(
        done=done,
        bytes_done=state.bytes_done,
        bytes_total=state.bytes_total,
        records=state.records,
        drive=state.drive,
        file=state.file,
        problems=[_problem(finding) for finding in fresh],
    )


def _problem(finding: ScrubFinding) -> pb.ScrubProblem:
    problem = finding.problem
    return pb.ScrubProblem(
        drive=finding.drive,
        file=str(finding.path),
        reason=problem.reason,
        layer=problem.layer,
        expert=problem.expert,
        offset=problem.offset or 0,
        bytes=problem.nbytes or 0,
    )


async def _require_unix(context: _Context) -> None:
    """Paths are opened only for who may connect to the daemon's own socket, which is its user."""
    if not context.peer().startswith("unix:"):
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            "mirrors can be added and removed over a Unix socket only; name them with --mirror at the start",
        )
