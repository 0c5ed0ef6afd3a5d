"""The flight recorder of a running daemon."""

from __future__ import annotations

from tierd.addresses import Address
from tierd.api import admin_pb2 as pb
from tierd.client.admin_call import admin_call
from tierd.errors import LimitExceeded
from tierd.rpc import read_safely

__all__ = ["fetch_dump"]

_SECONDS = 30.0
_MOST_BYTES = 256 << 20


async def fetch_dump(address: Address, seconds: float) -> bytes:
    """What happened in the last `seconds`: a Chrome trace as JSON text.

    Raises:
        DaemonUnavailable: nobody answers.
        LimitExceeded: it is longer than 256 MiB.
    """
    async with admin_call(address) as admin:
        call = admin.Dump(pb.DumpRequest(seconds=seconds), timeout=_SECONDS)
        trace = bytearray()
        try:
            while isinstance(message := await read_safely(call), pb.DumpResponse):
                trace += message.piece
                if len(trace) > _MOST_BYTES:
                    raise LimitExceeded(f"{address}: the trace is longer than {_MOST_BYTES} bytes")
        finally:
            call.cancel()
    return bytes(trace)
