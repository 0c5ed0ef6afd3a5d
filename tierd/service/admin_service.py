"""What operators ask of the daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import grpc.aio

from tierd.api import admin_pb2 as pb
from tierd.api import admin_pb2_grpc

__all__ = ["AdminService"]

_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Statistics, and a graceful stop."""

    def __init__(self, stats: Callable[[], pb.GetStatsResponse], stop: Callable[[float | None], None]) -> None:
        self._stats = stats
        self._stop = stop

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
