"""Memory's part of the metrics: the arena, the whole daemon, and what it brought from earlier runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from prometheus_client.core import Metric

from tierd.arena.arena import Arena
from tierd.observe.families import counter, gauge
from tierd.service.ram import RamKeeper
from tierd.service.remembering import Remembering

__all__ = ["arena_metrics", "memory_metrics"]

_SLOTS = gauge("tierd_arena_slots", "Slots of the arena by state; they add up to all.", "state")
_GRANTED = gauge("tierd_arena_granted_slots", "Ready slots that a node holds.")
_BYTES = gauge("tierd_arena_bytes", "Bytes for experts in RAM.")
_HUGE = gauge("tierd_arena_huge_page_bytes", "Of the arena, bytes on 2 MiB pages.")
_LOCKED = gauge(
    "tierd_arena_locked_bytes", "Of the arena, bytes that cannot be swapped out; 0 where RLIMIT_MEMLOCK is too low."
)
_EXCESS = gauge("tierd_arena_excess_bytes", "Shared memory of a smaller arena that is not given back yet.")
_PUNCHES = counter("tierd_arena_punches", "How often memory was given back to the host.")
_MEMBARRIER = gauge("tierd_membarrier", "1 where the kernel offers the fence for reads without messages.")
_RAM = gauge("tierd_ram_bytes", "Memory that the whole daemon may have.")
_PROCESS = gauge(
    "tierd_process_memory_bytes",
    "Memory of the process: anonymous, shared (the arena), file; and of it what is locked, or swapped out.",
    "kind",
)
_HOST_SWAP = gauge(
    "tierd_host_swap_used_bytes", "Swap that the host uses; the arena may be among it unless it is locked."
)
_PINNED = gauge("tierd_pinned_experts", "Experts that are pinned, in RAM or not.")
_SAVES = counter("tierd_history_saves", "How often the usage history was written.")

_KINDS: Final = {
    "anonymous": "RssAnon", "shared": "RssShmem", "file": "RssFile", "locked": "VmLck", "swapped": "VmSwap"
}  # fmt: skip


def arena_metrics(arena: Arena) -> Iterator[Metric]:
    """One pass over the slots."""
    counts = arena.counts()
    states = [("free", counts.free - arena.spares_left), ("spare", arena.spares_left)]
    states += [(s, getattr(counts, s)) for s in ("filling", "ready", "retired", "abandoned", "withdrawn")]
    yield _SLOTS.of(((state,), count) for state, count in states)
    yield _GRANTED.one(counts.granted)
    yield _BYTES.one(arena.slots * arena.slot_bytes)
    yield _HUGE.one(arena.huge_page_bytes)
    yield _LOCKED.one(arena.locked_bytes)
    yield _EXCESS.one(arena.excess_bytes)
    yield _MEMBARRIER.one(float(arena.fenced))


def memory_metrics(ram: RamKeeper, remembering: Remembering) -> Iterator[Metric]:
    """The keepers' counters, and what the kernel says of this process and host."""
    yield _RAM.one(ram.size.ram)
    yield _PUNCHES.one(ram.punched)
    yield _PINNED.one(remembering.pinned)
    yield _SAVES.one(remembering.file.saved if remembering.file is not None else 0)
    process = _kernel_sizes(Path("/proc/self/status"))
    yield _PROCESS.of(((kind,), process.get(name, 0)) for kind, name in _KINDS.items())
    host = _kernel_sizes(Path("/proc/meminfo"))
    yield _HOST_SWAP.one(host.get("SwapTotal", 0) - host.get("SwapFree", 0))


def _kernel_sizes(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file of the kernel, in bytes; empty where there is no such file."""
    sizes: dict[str, int] = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if len(words) == 2 and words[1] == "kB":
                sizes[name] = int(words[0]) << 10
    return sizes
