"""Calls of operators to a daemon of this host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from tierd.access import LOCAL_ACCESS
from tierd.addresses import Address
from tierd.api import admin_pb2_grpc
from tierd.rpc import error_of

__all__ = ["admin_call"]


@asynccontextmanager
async def admin_call(address: Address) -> AsyncIterator[admin_pb2_grpc.AdminServiceAsyncStub]:
    """A stub that is connected within the block; what gRPC raises there becomes one of this project's errors."""
    async with LOCAL_ACCESS.channel(address) as channel:
        try:
            yield admin_pb2_grpc.AdminServiceStub(channel)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, str(address)) from error
