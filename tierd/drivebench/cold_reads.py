"""Our side: a real daemon, and clients that ask it for whole layers which are never in RAM.

Two sessions ask in turn, as two nodes or one node and its hints would, so that the drive has the next request while
the last experts of one are being answered. The drive serves both alike, so they would also end together if they began
together, and it would have nothing to do until both have asked again: each slice begins with half a request of the
second.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from tierd.client.arena_source import ArenaSource
from tierd.client.daemon_stats import fetch_stats, stats_object
from tierd.client.loop_thread import LoopThread
from tierd.client.private_daemon import PrivateDaemon
from tierd.client.source import Phase
from tierd.errors import DaemonUnavailable
from tierd.store.store import ExpertStore

__all__ = ["ColdReads", "Usage"]

_SESSIONS: Final = 2
_PREFAULT_SECONDS: Final = 20.0
_PATIENCE_SECONDS: Final = 10.0

_Result = TypeVar("_Result")


@dataclass(slots=True)
class Usage:
    """What was moved and what it cost.

    Attributes:
        nbytes: delivered from the drives to the clients.
        seconds: of the slices.
        daemon_cpu: seconds of processor time in the daemon.
        client_cpu: seconds of processor time in this process.
        hits: experts that were in RAM after all; they are not in `nbytes`.
    """

    nbytes: int = 0
    seconds: float = 0.0
    daemon_cpu: float = 0.0
    client_cpu: float = 0.0
    hits: int = 0


class ColdReads:
    """A daemon of its own for a store, and the sessions that read from it.

    Args:
        store: with more expert bytes than both sessions' requests together.
        options: further options of `tierd serve`.
        request_bytes: experts of a layer that are asked for together, at most (but one expert at least).

    Attributes:
        usage: of all slices so far.
        arena: the arena's figures once its memory was there, from the daemon's statistics.
        depth: reads in flight on the first drive.
    """

    def __init__(self, store: ExpertStore, *options: str, request_bytes: int) -> None:
        geometry = store.geometry
        record = geometry.slot_bytes
        together = max(1, min(request_bytes // record, max(layer.experts for layer in geometry.layers)))
        requests = [
            (entry.layer, tuple(range(start, min(start + together, entry.experts))))
            for entry in geometry.layers
            for start in range(0, entry.experts, together)
        ]
        self._record_bytes = {entry.layer: geometry.layout(entry.layer).record_bytes for entry in geometry.layers}
        self.usage = Usage()
        # Two requests of each session's size fit: one is read while the other one's grants are given back.
        slots = 2 * _SESSIONS * together
        # Least recently used first: with it a scan that is larger than the arena never meets what it left behind.
        self._daemon = PrivateDaemon(store.path, "--arena", str(slots * record), "--policy", "lru", *_QUIET, *options)
        self._sources: list[ArenaSource] = []
        try:
            self.arena, self.depth = self._warmed()
            self._sources = [self._connect(store, number) for number in range(_SESSIONS)]
        except BaseException:
            self.close()
            raise
        self._turns = [_Turns(requests[number::_SESSIONS]) for number in range(_SESSIONS)]
        self._pool = ThreadPoolExecutor(_SESSIONS, thread_name_prefix="tierd-bench")

    @property
    def pid(self) -> int:
        """The daemon's process."""
        return self._daemon.pid

    def stats(self) -> dict[str, Any]:
        """The daemon's statistics."""
        return stats_object(
            LoopThread.shared().run(fetch_stats(self._daemon.address), seconds=10.0, what="the daemon's statistics")
        )

    def run(self, seconds: float) -> float:
        """Ask for cold layers for so many seconds; bytes per second from the first request to the last answer."""
        daemon_before, own_before = _cpu_seconds(self.pid), time.process_time()
        before = self._delivered()
        hits_before = sum(source.stats.outcomes["hit"] for source in self._sources)
        begun = time.monotonic()
        for number, turns in enumerate(self._turns):
            turns.begin_with(number / _SESSIONS)
        gate = threading.Barrier(_SESSIONS)
        jobs = [
            self._pool.submit(self._ask, source, turns, gate, begun + seconds)
            for source, turns in zip(self._sources, self._turns, strict=True)
        ]
        ended = max(job.result() for job in jobs)
        moved = self._delivered() - before
        self.usage.nbytes += moved
        self.usage.seconds += ended - begun
        self.usage.daemon_cpu += _cpu_seconds(self.pid) - daemon_before
        self.usage.client_cpu += time.process_time() - own_before
        self.usage.hits += sum(source.stats.outcomes["hit"] for source in self._sources) - hits_before
        return moved / (ended - begun)

    def close(self) -> None:
        """Ends sessions and daemon."""
        for source in self._sources:
            source.close()
        self._daemon.stop()

    def _ask(self, source: ArenaSource, turns: _Turns, gate: threading.Barrier, until: float) -> float:
        gate.wait()
        while time.monotonic() < until:
            layer, experts = turns.next()
            before = source.stats.outcomes["miss"]
            source.visit(layer, experts, _look, step=turns.step, phase=Phase.PREFILL)
            turns.nbytes += (source.stats.outcomes["miss"] - before) * self._record_bytes[layer]
        return time.monotonic()

    def _delivered(self) -> int:
        return sum(turns.nbytes for turns in self._turns)

    def _connect(self, store: ExpertStore, number: int) -> ArenaSource:
        address = self._daemon.address
        return _patiently(
            lambda: ArenaSource(address, store, name=f"bench {number}", numerics="none", kernel_path="none")
        )

    def _warmed(self) -> tuple[dict[str, Any], int]:
        """Wait for the arena's memory: reads into pages that are not there yet measure the kernel."""
        until = time.monotonic() + _PREFAULT_SECONDS
        while True:
            stats = _patiently(self.stats)
            arena = stats["arena"]
            if arena["huge_page_bytes"] >= arena["bytes"] or time.monotonic() > until:
                return arena, int(stats["drives"][0]["threads"])
            time.sleep(0.05)


class _Turns:
    """A session's requests, again and again."""

    def __init__(self, requests: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        self._requests = requests
        self._share = 0.0
        self.step = 0
        self.nbytes = 0

    def begin_with(self, share: float) -> None:
        """Of the next request ask for this share only; 0 for all of it."""
        self._share = share

    def next(self) -> tuple[int, tuple[int, ...]]:
        layer, experts = self._requests[self.step % len(self._requests)]
        self.step += 1
        few, self._share = int(len(experts) * self._share), 0.0
        return layer, experts[:few] or experts


_QUIET: Final = ("--http", "off", "--log-level", "error", "--history", "off")


def _patiently(call: Callable[[], _Result]) -> _Result:
    """Call until the daemon answers: on a machine that is busy a connection may take longer than gRPC waits."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return call()
        except DaemonUnavailable:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _look(expert: int, address: int) -> None:
    """What a node would compute; here nothing."""
    del expert, address


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process (proc(5): fields 14 and 15, counted behind the name)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
