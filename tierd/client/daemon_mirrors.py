"""Mirrors of a running daemon: adding one, taking one away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tierd.addresses import Address
from tierd.api import admin_pb2 as pb
from tierd.client.admin_call import admin_call
from tierd.rpc import plain_object

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
    request = pb.AddMirrorRequest(directory=str(directory), weight=weight)
    async with admin_call(address) as admin:
        answer = await admin.AddMirror(request, timeout=_SECONDS)
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
    async with admin_call(address) as admin:
        answer = await admin.RemoveMirror(pb.RemoveMirrorRequest(name=name), timeout=_SECONDS)
    return answer.name
