"""The daemon's counters as one message, for `tierd stats` and for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tierd.api import admin_pb2 as pb
from tierd.arena.arena import Arena
from tierd.broker import Broker
from tierd.devices.device import Device
from tierd.requests import Outcome
from tierd.service.session import Session

__all__ = ["statistics"]


def statistics(
    *,
    boot_id: str,
    uptime_seconds: float,
    broker: Broker,
    arena: Arena,
    device: Device,
    sessions: Iterable[Session],
    attached: Callable[[int], bool],
) -> pb.GetStatsResponse:
    """All counters at one moment of the event loop, so that they add up."""
    total, waits = broker.stats.total(), broker.stats.wait_seconds
    requests = pb.Requests(
        requests=total.requests,
        hits=total.hits,
        misses=total.misses,
        joined=total.joined,
        cancelled=total.cancelled,
        failed=total.failed,
        pending=broker.pending(),
        repeated=broker.stats.repeated,
        miss_wait_seconds=waits[Outcome.MISS],
        joined_wait_seconds=waits[Outcome.JOINED],
    )
    slots = arena.counts()
    memory = pb.Arena(
        bytes=arena.slots * arena.slot_bytes,
        slot_bytes=arena.slot_bytes,
        slots=arena.slots,
        slots_free=slots.free,
        slots_filling=slots.filling,
        slots_ready=slots.ready,
        slots_granted=slots.granted,
        evictions=broker.stats.evictions,
        huge_page_bytes=arena.huge_page_bytes,
    )
    drive = pb.Drive(
        name=device.name,
        reads=device.stats.reads,
        bytes=device.stats.bytes,
        errors=device.stats.errors,
        read_seconds=device.stats.read_seconds,
        direct=device.stats.direct,
    )
    nodes = [
        pb.Session(
            id=session.id,
            name=session.name,
            attached=attached(session.id),
            grants=broker.grants(session.id),
            requests=broker.requests(session.id),
        )
        for session in sessions
    ]
    return pb.GetStatsResponse(
        boot_id=boot_id,
        uptime_seconds=uptime_seconds,
        requests=requests,
        arena=memory,
        drives=[drive],
        sessions=nodes,
    )
