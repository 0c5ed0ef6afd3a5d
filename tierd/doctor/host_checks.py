"""The host: memory, huge pages, the memory barrier, permissions and limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierd.addresses import runtime_directory
from tierd.arena.fence import WriterFence
from tierd.arena.memory import EXTENT_BYTES, SharedPayload
from tierd.devices.probe import DEFAULT_DEPTH
from tierd.doctor.check import Check, Status
from tierd.errors import ArenaError, UsageError
from tierd.memory_limits import GroupLimit, HostMemory, group_limits, host_memory
from tierd.service.budget import AUTO, DaemonFacts, choose_ram, plan_budget
from tierd.sizes import format_bytes, format_share
from tierd.state import state_directory
from tierd.store.store import ExpertStore

__all__ = [
    "MemoryRoom",
    "check_descriptors",
    "check_folders",
    "check_huge_pages",
    "check_membarrier",
    "check_memory",
    "memory_room",
]

_TRIAL_BYTES: Final = 4 * EXTENT_BYTES
_OTHER_DESCRIPTORS: Final = 256
"""Sockets, sessions and the like."""


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """What experts could have on this host.

    Attributes:
        lines: how that was found, for people.
        free: bytes that nobody uses.
        for_experts: of these, bytes for an arena beside the daemon itself and a compute node; 0 if none.
        lacking: why no daemon fits; empty if one does.
    """

    lines: tuple[str, ...]
    free: int
    for_experts: int
    lacking: str = ""


def memory_room(
    store: ExpertStore, max_sessions: int, host: HostMemory | None = None, groups: Sequence[GroupLimit] | None = None
) -> MemoryRoom:
    """The sum behind `--ram auto`, for this store on this host.

    Args:
        store: to be served.
        max_sessions: compute nodes at once.
        host: the host's memory; read by default.
        groups: limits that hold for this process; read by default.
    """
    host = host_memory() if host is None else host
    groups = group_limits() if groups is None else groups
    geometry = store.geometry
    choice = choose_ram(AUTO, host, groups, dense_bytes=store.manifest.dense_bytes)
    facts = DaemonFacts(
        experts=geometry.experts_total,
        slot_bytes=geometry.slot_bytes,
        top_k=geometry.top_k,
        spares=DEFAULT_DEPTH + 1,
        max_sessions=max_sessions,
    )
    free = min([host.available, *(group.limit - group.used for group in groups)])
    try:
        slots = plan_budget(choice.nbytes, facts).slots
    except UsageError as error:
        return MemoryRoom(choice.lines, free, 0, error.message.removeprefix("--ram: "))
    return MemoryRoom(choice.lines, free, slots * geometry.slot_bytes)


def check_memory(store: ExpertStore, room: MemoryRoom) -> Check:
    """What the arena could take, and the sum that leads to it."""
    whole = store.geometry.experts_total * store.geometry.slot_bytes
    sums = "; ".join(room.lines)
    if room.lacking:
        remedy = "Free memory, or run on a host or in a container with more."
        return Check("memory", Status.PROBLEM, f"{room.lacking}; {sums}", remedy)
    share = f"{format_share(room.for_experts / whole)} of the model's"
    return Check("memory", Status.OK, f"experts can have {format_bytes(room.for_experts)}, {share}; {sums}")


def check_huge_pages() -> Check:
    """Whether shared memory comes in pages of 2 MiB here: tried, not read from a setting."""
    try:
        payload = SharedPayload.create(_TRIAL_BYTES)
    except ArenaError as error:
        return Check("huge pages", Status.PROBLEM, error.message, error.hint)
    try:
        payload.start_prefault()
        payload.wait_prefault(10.0)
        got = payload.huge_page_bytes
    finally:
        payload.close()
    if got == _TRIAL_BYTES:
        return Check("huge pages", Status.OK, "shared memory comes in pages of 2 MiB")
    return Check(
        "huge pages",
        Status.REMARK,
        f"only {format_bytes(got)} of {format_bytes(_TRIAL_BYTES)} came in pages of 2 MiB; direct reads are slower so",
        "Linux 6.1 or later gives them (MADV_COLLAPSE); transparent huge pages must not be compiled out.",
    )


def check_membarrier() -> Check:
    """Whether resident experts can be read without a message."""
    fence = WriterFence()
    if fence.kind == "global-expedited":
        return Check("membarrier", Status.OK, "offered; resident experts can be read without a message")
    if fence.available:
        return Check(
            "membarrier",
            Status.REMARK,
            "only the slow form is offered; making room in the arena takes some 10 ms",
            "Linux 4.16 or later has the expedited form.",
        )
    return Check(
        "membarrier",
        Status.REMARK,
        "refused by the kernel; nodes ask for every expert by message",
        "Allow the system call membarrier in the container's seccomp profile.",
    )


def check_folders() -> list[Check]:
    """Whether sockets and notes can be written where they belong."""
    return [
        _writable(
            "sockets", runtime_directory(), Status.PROBLEM, "Set XDG_RUNTIME_DIR, or give --listen another place."
        ),
        _writable(
            "state", state_directory(), Status.REMARK, "Set XDG_STATE_HOME to a place where tierd may remember things."
        ),
    ]


def _writable(name: str, folder: Path, otherwise: Status, remedy: str) -> Check:
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return Check(name, Status.OK, f"{folder} can be written")
    return Check(name, otherwise, f"{folder} cannot be written", remedy)


def check_descriptors(store: ExpertStore, drives: int) -> Check:
    """Whether all shards of all drives can be open at once, twice where one refuses direct reads."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * drives * len(store.manifest.shards) + _OTHER_DESCRIPTORS
    detail = f"{needed} may be needed, {soft} are allowed"
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return Check("open files", Status.OK, detail)
    return Check(
        "open files", Status.PROBLEM, detail, f"Raise the limit: ulimit -n {needed} (the hard limit is {hard})."
    )
