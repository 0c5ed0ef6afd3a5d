"""Changing a running daemon: its memory and its pins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierd.addresses import Address
from tierd.api import admin_pb2 as pb
from tierd.client.admin_call import admin_call
from tierd.rpc import plain_object

__all__ = ["set_pins", "set_ram"]

_RAM_SECONDS = 120.0
"""Moving experts, waiting for grants to end, and reserving memory on a tmpfs."""
_PIN_SECONDS = 10.0


async def set_ram(address: Address, ram: str) -> dict[str, Any]:
    """Give a daemon another amount of memory.

    Args:
        address: of the daemon.
        ram: `32GiB`, `75%` or `auto`.

    Returns:
        See `SetRamResponse` in proto/tierd/v1/admin.proto.

    Raises:
        LimitExceeded: the daemon refuses it and says why.
        DaemonUnavailable: nobody answers, or there is not so much memory.
    """
    async with admin_call(address) as admin:
        return plain_object(await admin.SetRam(pb.SetRamRequest(ram=ram), timeout=_RAM_SECONDS))


async def set_pins(address: Address, layer: int, experts: Sequence[int], *, pinned: bool) -> int:
    """Pin or unpin experts of a layer, all of it if none are named; returns how many are pinned now.

    Raises:
        LimitExceeded: there is no such layer or expert.
        DaemonUnavailable: nobody answers.
    """
    request = pb.PinRequest(layer=layer, experts=experts, unpin=not pinned)
    async with admin_call(address) as admin:
        answer = await admin.Pin(request, timeout=_PIN_SECONDS)
    return answer.pinned
