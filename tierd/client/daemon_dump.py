"""The flight recorder of a running daemon."""

from __future__ import annotations

import grpc.aio

from tierd.addresses import Address
from tierd.api import admin_pb2 as pb
from tierd.api import admin_pb2_grpc
from tierd.errors import LimitExceeded
from tierd.rpc import CHANNEL_OPTIONS, error_of, read_safely

__all__ = ["fetch_dump"]

_SECONDS = 30.0
_MOST_BYTES = 256 << 20


async def fetch_dump(address: Address, seconds: float) -> bytes:
    """What happened in the last `seconds`: a Chrome trace as JSON text.

    Raises:
        DaemonUnavailable: nobody answers.
        LimitExceeded: it is longer than 256 MiB.
    """
    async with grpc.aio.insecure_channel(address.target, options=CHANNEL_OPTIONS) as channel:
        call = admin_pb2_grpc.AdminServiceStub(channel).Dump(pb.DumpRequest(seconds=seconds), timeout=_SECONDS)
        trace = bytearray()
        try:
            while isinstance(message := await read_safely(call), pb.DumpResponse):
                trace += message.piece
                if len(trace) > _MOST_BYTES:
                    raise LimitExceeded(f"{address}: the trace is longer than {_MOST_BYTES} bytes")
        except grpc.aio.AioRpcError as error:
            raise error_of(error, str(address)) from error
        finally:
            call.cancel()
    return bytes(trace)
