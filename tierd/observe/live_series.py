"""The last ten minutes of the daemon in counters, so that a page that is opened now has a past to show."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

__all__ = ["INTERVAL", "LiveSeries", "StepCounter"]

INTERVAL: Final = 2.0
"""Seconds between samples."""
_SAMPLES: Final = 301


class StepCounter:
    """Decode steps of all nodes together, though nodes come and go.

    Args:
        steps: the step of each session, as its node says.
    """

    def __init__(self, steps: Callable[[], Mapping[int, int]]) -> None:
        self._steps = steps
        self._last: dict[int, int] = {}
        self._total = 0

    def total(self) -> int:
        """Steps since the first call; a session's steps before it was seen first do not count."""
        now = dict(self._steps())
        self._total += sum(max(0, step - self._last[session]) for session, step in now.items() if session in self._last)
        self._last = now
        return self._total


class LiveSeries:
    """A ring of samples: the time, and counters that only rise.

    Args:
        sample: the counters by name; always the same names.
    """

    def __init__(self, sample: Callable[[], Mapping[str, float]]) -> None:
        self._sample = sample
        self._rows: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=_SAMPLES)

    def take(self, now: float) -> None:
        """Take a sample at `now`, seconds since the epoch. Where the clock was set back, a new past begins."""
        if self._rows and self._rows[-1][0] > now:
            self._rows.clear()
        self._rows.append((now, self._sample()))

    def columns(self) -> dict[str, list[float]]:
        """The samples as columns; `time` holds seconds since the epoch."""
        names = list(self._rows[0][1]) if self._rows else []
        columns = {"time": [round(at, 3) for at, _ in self._rows]}
        return columns | {name: [row[name] for _, row in self._rows] for name in names}
