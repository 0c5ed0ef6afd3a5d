"""A scrub inside a running daemon, watched from outside: it goes on as long as somebody watches."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from tierd.addresses import Address
from tierd.api import admin_pb2 as pb
from tierd.client.admin_call import admin_call
from tierd.errors import DaemonUnavailable
from tierd.rpc import read_safely

__all__ = ["watch_scrub"]


async def watch_scrub(address: Address, bytes_per_second: int) -> AsyncIterator[pb.ScrubResponse]:
    """Let the daemon read all its copies again.

    Args:
        address: of the daemon.
        bytes_per_second: bound on the rate; 0 leaves it to the daemon.

    Yields:
        Progress and findings, see proto/tierd/v1/admin.proto; the last message has `done`.

    Raises:
        SessionRefused: a scrub is running already.
        DaemonUnavailable: nobody answers, or the daemon went away.
    """
    async with admin_call(address) as admin:
        call = admin.Scrub(pb.ScrubRequest(bytes_per_second=bytes_per_second))
        try:
            while True:
                message = await read_safely(call)
                if message is grpc.aio.EOF:
                    raise DaemonUnavailable(f"{address} ended the scrub before all was read")
                assert isinstance(message, pb.ScrubResponse)
                yield message
                if message.done:
                    return
        finally:
            call.cancel()
