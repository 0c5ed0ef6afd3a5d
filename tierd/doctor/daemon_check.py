"""The daemon that serves the store now, if there is one: what it says of its drives."""

from __future__ import annotations

import asyncio

from tierd.addresses import Address
from tierd.api import admin_pb2 as pb
from tierd.client.daemon_stats import fetch_stats
from tierd.doctor.check import Check, Status
from tierd.errors import TierdError
from tierd.sizes import format_bytes, format_duration

__all__ = ["check_daemon", "check_drives"]


def check_daemon(address: Address) -> list[Check]:
    """Asks the daemon at a Unix socket; nothing where there is no socket."""
    if address.path is None or not address.path.exists():
        return []
    try:
        stats = asyncio.run(fetch_stats(address))
    except TierdError:
        return [
            Check(
                "daemon",
                Status.REMARK,
                f"nobody answers at {address}; a daemon that was killed leaves its socket behind",
                "Start it again: `tierd serve` takes the socket over.",
            )
        ]
    asked = f"{stats.requests.requests:,} experts asked for, {stats.requests.failed:,} failed"
    checks = [Check("daemon", Status.OK, f"answers at {address}, up {format_duration(stats.uptime_seconds)}: {asked}")]
    return checks + check_drives(stats)


def check_drives(stats: pb.GetStatsResponse) -> list[Check]:
    """What the daemon's counters say of each drive."""
    checks = []
    for drive in stats.drives:
        name = f"drive {drive.name}"
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(drive.errors_by_kind.items()))
        trouble = [f"{drive.errors} errors ({kinds})"] if drive.errors else []
        trouble += [f"{drive.stalls} reads not answered in time"] if drive.stalls else []
        detail = f"{drive.directory}: {drive.state}, {drive.reads:,} reads, {format_bytes(drive.bytes)}"
        detail += f"; {', '.join(trouble)}" if trouble else ""
        if drive.state == "absent":
            checks.append(
                Check(name, Status.PROBLEM, f"{detail}; it has no shard to offer", "Stage it, or leave it out.")
            )
        elif not drive.up:
            remedy = "Look at the kernel's log and the drive's cable; to see whether its copies are whole: tierd scrub."
            checks.append(Check(name, Status.PROBLEM, detail, f"{remedy} It is probed again by itself."))
        elif trouble:
            remedy = "Other copies were read instead; `tierd scrub` reads all of them again."
            checks.append(Check(name, Status.REMARK, detail, remedy))
        else:
            checks.append(Check(name, Status.OK, detail))
    return checks
