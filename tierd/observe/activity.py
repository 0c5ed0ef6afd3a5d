"""What happens in the daemon, as it happens: waits, uses, evictions and reads, for metrics, page and flight recorder.

Every method is called on the daemon's loop and takes about a microsecond.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierd.devices.device import RecordRead
from tierd.devices.histogram import Histogram
from tierd.errors import DriveError
from tierd.observe.families import WAIT_SECONDS
from tierd.observe.recorder import FlightRecorder
from tierd.requests import AcquireRequest, Granted, Outcome, Phase, Refused
from tierd.store.geometry import Geometry

__all__ = ["Activity"]

_REGRET_SECONDS: Final = (0.01, 0.1, 1.0, 10.0, 60.0, 600.0)
_LAG_SECONDS: Final = (1e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 1.0)

_LAYER_KEYS: Final = ("layer", "phase", "asked", "hits", "misses", "joined", "refused")
_READ_KEYS: Final = ("layer", "expert", "bytes", "queued_ms", "error")
_EXPERT_KEYS: Final = ("layer", "expert")
_HINT_KEYS: Final = ("layer", "experts")


@dataclass(slots=True)
class _Asked:
    """A request of which something is undecided."""

    id: int
    layer: int
    phase: Phase
    at: float
    count: int
    left: int
    hits: int = 0
    misses: int = 0
    joined: int = 0
    refused: int = 0


class Activity:
    """Takes note.

    Args:
        geometry: of the store.
        clock: seconds, rising.

    Attributes:
        recorder: where events go.
        uses: uint32[experts], experts asked for by message since the start, by flat number; it wraps.
        expert_waits: from asked to readable, by outcome.
        layer_waits: from asked to all decided, by phase.
        regrets: from an eviction to the next request for the same expert.
        read_queue: from a read's submission to its start, all drives.
        lags: how late the loop answered a timer.
    """

    def __init__(self, geometry: Geometry, clock: Callable[[], float]) -> None:
        self.recorder = FlightRecorder(clock)
        self.uses: NDArray[np.uint32] = np.zeros(geometry.experts_total, dtype=np.uint32)
        self._quick_uses = self.uses.data
        self.expert_waits = {outcome: Histogram(WAIT_SECONDS) for outcome in Outcome}
        self.layer_waits = {phase: Histogram(WAIT_SECONDS) for phase in Phase}
        self.regrets = Histogram(_REGRET_SECONDS)
        self.read_queue = Histogram(WAIT_SECONDS)
        self.lags = Histogram(_LAG_SECONDS)
        self._ranges = {entry.layer: (geometry.layer_start(entry.layer), entry.experts) for entry in geometry.layers}
        self._clock = clock
        self._asked: dict[int, _Asked] = {}
        self._left_at = array("d", [nan]) * geometry.experts_total
        self._places = [(entry.layer, expert) for entry in geometry.layers for expert in range(entry.experts)]

    # What the broker, its policy and the drives tell.

    def waited(self, outcome: Outcome, seconds: float) -> None:
        """An expert became readable for a session."""
        self.expert_waits[outcome].observe(seconds)

    def evicted(self, flat: int) -> None:
        """An expert left RAM for another."""
        self._left_at[flat] = self._clock()
        self.recorder.instant("evictions", "evict", _EXPERT_KEYS, self._places[flat])

    def read_ended(
        self, drive: str, read: RecordRead, queued: float, reading: float, moved: int, error: DriveError | None
    ) -> None:
        """A read of a drive returned just now, after `queued` seconds in its queue and `reading` seconds at work."""
        self.read_queue.observe(queued)
        now = self._clock()
        why = "" if error is None else error.message
        values = (read.layer, read.index, moved, round(queued * 1e3, 3), why)
        name = "read" if error is None else "read failed"
        self.recorder.span(f"drive {drive}", name, now - reading, now, _READ_KEYS, values)

    def lagged(self, seconds: float) -> None:
        """The event loop answered a timer this late."""
        self.lags.observe(seconds)

    # What sessions tell.

    def asked(self, session_id: int, request: AcquireRequest) -> None:
        """A session's request was taken; what it had asked for before is over."""
        now = self._clock()
        start, experts = self._ranges.get(request.layer, (0, 0))
        if not (request.experts and 0 <= min(request.experts) <= max(request.experts) < experts):
            return  # the broker will say so
        uses, left_at = self._quick_uses, self._left_at
        for expert in request.experts:
            flat = start + expert
            uses[flat] = (uses[flat] + 1) & 0xFFFFFFFF
            gap = now - left_at[flat]
            if gap >= 0:
                self.regrets.observe(gap)
                left_at[flat] = nan
        count = len(request.experts)
        self._asked[session_id] = _Asked(request.id, request.layer, request.phase, now, count, count)

    def answered(self, session_id: int, acquire_id: int, granted: list[Granted], refused: list[Refused]) -> None:
        """Some experts of a request are decided."""
        asked = self._asked.get(session_id)
        if asked is None or asked.id != acquire_id:
            return
        for one in granted:
            asked.hits += one.outcome is Outcome.HIT
            asked.misses += one.outcome is Outcome.MISS
            asked.joined += one.outcome is Outcome.JOINED
        asked.refused += len(refused)
        asked.left -= len(granted) + len(refused)
        if asked.left <= 0:
            del self._asked[session_id]
            now = self._clock()
            self.layer_waits[asked.phase].observe(now - asked.at)
            values = (
                asked.layer, asked.phase.value, asked.count, asked.hits, asked.misses, asked.joined, asked.refused
            )  # fmt: skip
            self.recorder.span(f"session {session_id}", f"layer {asked.layer}", asked.at, now, _LAYER_KEYS, values)

    def hinted(self, session_id: int, layer: int, experts: int) -> None:
        """A session named experts that it may want soon."""
        self.recorder.instant(f"session {session_id}", "hint", _HINT_KEYS, (layer, experts))

    def opened(self, session_id: int, name: str) -> None:
        """A node was admitted."""
        self.recorder.instant(f"session {session_id}", "opened", ("node",), (name,))

    def closed(self, session_id: int, why: str) -> None:
        """A session is over."""
        self._asked.pop(session_id, None)
        self.recorder.instant(f"session {session_id}", "closed", ("why",), (why,))
