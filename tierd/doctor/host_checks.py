"""The host: memory, huge pages, the memory barrier, permissions and limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tierd.addresses import runtime_directory
from tierd.arena.fence import WriterFence
from tierd.arena.memory import EXTENT_BYTES, SharedPayload
from tierd.doctor.check import Check, Status
from tierd.doctor.memory_limits import MemoryLimit
from tierd.errors import ArenaError
from tierd.sizes import format_bytes
from tierd.state import state_directory
from tierd.store.store import ExpertStore

__all__ = [
    "check_descriptors",
    "check_folders",
    "check_huge_pages",
    "check_membarrier",
    "check_memory",
    "most_for_experts",
]

_DAEMON_BYTES: Final = 200 << 20
"""Interpreter, libraries, index and buffers of a daemon, without the arena."""
_SLACK: Final = 0.05
"""Share of the memory that is left to everything else."""
_TRIAL_BYTES: Final = 4 * EXTENT_BYTES
_OTHER_DESCRIPTORS: Final = 256
"""Sockets, sessions and the like."""


def most_for_experts(limits: Sequence[MemoryLimit], dense_bytes: int) -> int:
    """Bytes that an arena could take beside the daemon itself and one node's dense weights; 0 if none."""
    tightest = min(limits, key=lambda limit: limit.free)
    return max(0, int(tightest.free - _SLACK * tightest.total) - _DAEMON_BYTES - dense_bytes)


def check_memory(store: ExpertStore, limits: Sequence[MemoryLimit]) -> Check:
    """What the arena could take, and the sum that leads to it."""
    tightest = min(limits, key=lambda limit: limit.free)
    dense, record = store.manifest.dense_bytes, store.geometry.slot_bytes
    whole = store.geometry.experts_total * record
    most = most_for_experts(limits, dense)
    detail = (
        f"{format_bytes(tightest.free)} free of {format_bytes(tightest.total)} ({tightest.where}); without "
        f"{format_bytes(_DAEMON_BYTES)} for the daemon, {format_bytes(dense)} of dense weights in one node and "
        f"{_SLACK:.0%} to spare, experts can have {format_bytes(most)}, {min(1.0, most / whole):.0%} of the model's"
    )
    least = store.geometry.top_k * record
    if most < record:
        return Check("memory", Status.PROBLEM, detail, "Free memory, or run on a host or in a container with more.")
    if most < least:
        return Check(
            "memory",
            Status.REMARK,
            f"{detail}; one token's experts of one layer alone take {format_bytes(least)}",
            f"Free memory; with --arena {most} layers are served in waves.",
        )
    return Check("memory", Status.OK, detail)


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
