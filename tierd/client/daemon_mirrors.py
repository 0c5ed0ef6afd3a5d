"""Mirrors of a running daemon: adding one, taking one away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc.aio

from tierd.addresses import Address
from tierd.api import admin_pb2 as pb
from tierd.api import admin_pb2_grpc
from tierd.client.daemon_stats import plain_object
from tierd.rpc import CHANNEL_OPTIONS, error_of

__all__ = ["add_mirror", "remove_mirror"]

_SECONDS = 60.0
"""The daemon measures a new drive, and waits for the last reads of one that goes."""


async def add_mirror(address: Address, directory: Path, weight: float) -> dict[str, Any]:
    """Let the daemon read from a directory, too.

    Returns:
        The drive as plain JSON values, see `Drive` in proto/tierd/v1/admin.proto.

    Raises:
        LimitExceeded: the daemon refuses it and says why.
        DaemonUnavailable: nobody answers.
    """
    async with grpc.aio.insecure_channel(address.target, options=CHANNEL_OPTIONS) as channel:
        request = pb.AddMirrorRequest(directory=str(directory), weight=weight)
        try:
            answer = await admin_pb2_grpc.AdminServiceStub(channel).AddMirror(request, timeout=_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, str(address)) from error
    return plain_object(answer.drive)


async def remove_mirror(address: Address, name: str) -> str:
    """Let the daemon read from a drive no longer.

    Args:
        address: of the daemon.
        name: of the drive, or its directory.

    Returns:
        The drive's name.

    Raises:
        LimitExceeded: the daemon refuses it and says why.
        DeadlineExceeded: its reads do not return.
        DaemonUnavailable: nobody answers.
    """
    async with grpc.aio.insecure_channel(address.target, options=CHANNEL_OPTIONS) as channel:
        request = pb.RemoveMirrorRequest(name=name)
        try:
            answer = await admin_pb2_grpc.AdminServiceStub(channel).RemoveMirror(request, timeout=_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, str(address)) from error
    return answer.name
