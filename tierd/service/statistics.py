"""The daemon's counters as one message, for `tierd stats` and for programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from tierd.api import admin_pb2 as pb
from tierd.arena.arena import Arena
from tierd.broker.broker import Broker
from tierd.broker.reading_ahead import ReadingAhead
from tierd.devices.device import DeviceStats
from tierd.prefetch.counts import Tally
from tierd.requests import Outcome
from tierd.service.drives import DriveInfo, Drives
from tierd.service.ram import RamKeeper
from tierd.service.remembering import Remembering
from tierd.service.session import Session

__all__ = ["drive_statistics", "prefetch_statistics", "statistics"]


def statistics(
    *,
    boot_id: str,
    uptime_seconds: float,
    broker: Broker,
    arena: Arena,
    drives: Drives,
    sessions: Iterable[Session],
    attached: Callable[[int], bool],
    ram: RamKeeper,
    remembering: Remembering,
) -> pb.GetStatsResponse:
    """All counters at one moment of the event loop, so that they add up."""
    counted = broker.stats
    total, waits = counted.total(), counted.wait_seconds
    requests = pb.Requests(
        requests=total.requests,
        hits=total.hits,
        misses=total.misses,
        joined=total.joined,
        cancelled=total.cancelled,
        failed=total.failed,
        pending=broker.pending(),
        repeated=counted.repeated,
        unasked=counted.unasked,
        miss_wait_seconds=waits[Outcome.MISS],
        joined_wait_seconds=waits[Outcome.JOINED],
    )
    slots = arena.counts()
    memory = pb.Arena(
        bytes=arena.slots * arena.slot_bytes,
        slot_bytes=arena.slot_bytes,
        slots=arena.slots,
        slots_free=slots.free - arena.spares_left,
        slots_filling=slots.filling,
        slots_ready=slots.ready,
        slots_granted=slots.granted,
        evictions=broker.stats.evictions,
        huge_page_bytes=arena.huge_page_bytes,
        spare_slots=arena.spares,
        slots_abandoned=slots.abandoned,
        most_slots=arena.most_slots,
        slots_withdrawn=slots.withdrawn,
        used_bytes=arena.used_bytes,
        excess_bytes=arena.excess_bytes,
        ram_bytes=ram.size.ram,
        punched=ram.punched,
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
        drives=[drive_statistics(drives, info) for info in drives.info.values()],
        sessions=nodes,
        history=pb.History(
            path=_shown(remembering.file.path) if remembering.file is not None else "",
            saved=remembering.file.saved if remembering.file is not None else 0,
            warm_wanted=remembering.wanted,
            warm_read=broker.background.landed,
            warm_left=len(broker.background),
            pinned=remembering.pinned,
        ),
        prefetch=prefetch_statistics(broker.ahead),
    )


def prefetch_statistics(ahead: ReadingAhead) -> pb.Prefetch:
    """What became of hinted experts."""

    def plain(tally: Tally) -> pb.Tally:
        return pb.Tally(experts=tally.experts, bytes=tally.bytes)

    counts = ahead.book.counts
    return pb.Prefetch(
        hinted=counts.hinted,
        cut=counts.cut,
        known=counts.known,
        issued=plain(counts.issued),
        used=plain(counts.used),
        late=plain(counts.late),
        wasted=plain(counts.wasted),
        cancelled=plain(counts.cancelled),
        dropped={reason.value: plain(tally) for reason, tally in counts.dropped.items()},
        pending=plain(ahead.book.pending()),
        throttle_level=ahead.level,
        guessed=counts.guessed,
        guess_level=ahead.guess_level,
    )


def drive_statistics(drives: Drives, info: DriveInfo) -> pb.Drive:
    """One drive: its counters, how it fares, what it holds."""
    member = next((drive for drive in drives.replicas.drives if drive.name == info.name), None)
    stats = member.device.stats if member is not None else DeviceStats(up=False)
    state = "absent" if member is None else "leaving" if member.leaving else member.health.state.value
    return pb.Drive(
        name=info.name,
        reads=stats.reads,
        bytes=stats.bytes,
        errors=stats.errors,
        read_seconds=stats.read_seconds,
        direct=stats.direct,
        in_flight=stats.in_flight,
        queue_seconds=stats.queue_seconds,
        checksum_failures=stats.checksum_failures,
        errors_by_kind=stats.errors_by,
        retries=stats.retries,
        stalls=stats.stalls,
        failovers=stats.failovers,
        hedges_won=stats.hedges_won,
        hedges_lost=stats.hedges_lost,
        up=stats.up,
        state=state,
        directory=_shown(info.directory),
        shards=[path.name for path in info.paths if path is not None],
        shards_total=len(info.paths),
        left_out=map(_shown, info.left_out),
        bandwidth=member.speed.bandwidth if member is not None else 0.0,
        weight=info.weight,
        threads=info.threads,
        measured=info.probe.how,
    )


def _shown(text: str | Path) -> str:
    """A path, or a text with one, as messages can hold it: bytes that are no UTF-8 as escapes."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")
