"""The flight recorder: what the daemon did in the last seconds, always on, in bounded memory.

Events are plain tuples in a ring, so that noting one costs well under a microsecond; names and arguments are put
together only when somebody asks for them. The result is a Chrome trace
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, "Trace Event Format"), which
chrome://tracing and https://ui.perfetto.dev show.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

__all__ = ["MOST_EVENTS", "SECONDS", "FlightRecorder"]

SECONDS: Final = 10.0
"""How far back a dump goes."""
MOST_EVENTS: Final = 1 << 16
"""Events kept, about 15 MB; a daemon that does more in ten seconds shows fewer seconds."""

_INSTANT: Final = -1.0


class _Event(NamedTuple):
    start: float
    seconds: float
    track: str
    name: str
    keys: tuple[str, ...]
    values: tuple[object, ...]


class FlightRecorder:
    """A ring of events.

    Args:
        clock: seconds, rising.
        most: events kept.

    Attributes:
        noted: events since the start, those that were overwritten included.
    """

    def __init__(self, clock: Callable[[], float], most: int = MOST_EVENTS) -> None:
        self.noted = 0
        self._clock = clock
        self._ring: deque[_Event] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._ring)

    def span(
        self, track: str, name: str, start: float, end: float, keys: tuple[str, ...], values: tuple[object, ...]
    ) -> None:
        """Something lasted from `start` to `end` on the recorder's clock.

        Args:
            track: row in the picture: a drive, a session.
            name: of the event.
            start: moment.
            end: moment.
            keys: names of the arguments; a constant of the caller.
            values: the arguments.
        """
        self.noted += 1
        self._ring.append(_Event(start, end - start, track, name, keys, values))

    def instant(self, track: str, name: str, keys: tuple[str, ...], values: tuple[object, ...]) -> None:
        """Something happened now."""
        self.noted += 1
        self._ring.append(_Event(self._clock(), _INSTANT, track, name, keys, values))

    def trace(self, seconds: float = SECONDS) -> dict[str, Any]:
        """The last `seconds` as a Chrome trace object; times are microseconds, and those before now negative."""
        return _trace(list(self._ring), self.noted, self._clock(), seconds)

    def dump(self, seconds: float = 0.0) -> Callable[[], bytes]:
        """The trace as of now; `seconds` of 0, or of more than `SECONDS`, stand for those.

        Returns:
            A function that writes it as JSON text in UTF-8. It takes some tenths of a second; any thread may call it.
        """
        wanted = seconds if 0.0 < seconds < SECONDS else SECONDS
        ring, noted, now = list(self._ring), self.noted, self._clock()
        return lambda: json.dumps(_trace(ring, noted, now, wanted), separators=(",", ":")).encode()


def _trace(ring: list[_Event], noted: int, now: float, seconds: float) -> dict[str, Any]:
    kept = [event for event in ring if event.start + max(0.0, event.seconds) >= now - seconds]
    tracks = {track: number for number, track in enumerate(sorted({event.track for event in kept}), start=1)}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "tierd"}}]
    events += [
        {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": track}}
        for track, number in tracks.items()
    ]
    for event in sorted(kept, key=lambda event: event.start):
        row: dict[str, Any] = {
            "pid": 1,
            "tid": tracks[event.track],
            "name": event.name,
            "ts": round((event.start - now) * 1e6, 1),
            "args": dict(zip(event.keys, event.values, strict=True)),
        }
        if event.seconds == _INSTANT:
            row |= {"ph": "i", "s": "t"}
        else:
            row |= {"ph": "X", "dur": round(event.seconds * 1e6, 1)}
        events.append(row)
    whole = not ring or len(ring) == noted or ring[0].start < now - seconds
    first = min((event.start for event in kept), default=now)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "seconds": seconds if whole else round(now - first, 3),
            "events": len(kept),
            "monotonic_seconds": now,
        },
    }
