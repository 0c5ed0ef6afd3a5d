"""The counters of a running daemon, fetched and made plain."""

from __future__ import annotations

from typing import Any

import grpc.aio

from tierd.access import LOCAL_ACCESS, Access
from tierd.addresses import Address
from tierd.api import admin_pb2 as pb
from tierd.api import admin_pb2_grpc
from tierd.rpc import error_of, plain_object

__all__ = ["DaemonStats", "fetch_stats", "stats_object"]

DaemonStats = pb.GetStatsResponse

_SECONDS = 5.0


async def fetch_stats(address: Address, access: Access = LOCAL_ACCESS) -> pb.GetStatsResponse:
    """Ask the daemon; DaemonUnavailable if nobody answers within 5 s, SessionRefused if it tells operators only."""
    async with access.channel(address) as channel:
        try:
            return await admin_pb2_grpc.AdminServiceStub(channel).GetStats(
                pb.GetStatsRequest(), timeout=_SECONDS, metadata=access.metadata(address)
            )
        except grpc.aio.AioRpcError as error:
            raise error_of(error, str(address)) from error


def stats_object(answer: pb.GetStatsResponse) -> dict[str, Any]:
    """The message as plain JSON values, see `plain_object`."""
    return plain_object(answer) | {"boot_id": answer.boot_id}
