"""Time that passes only when the simulation says so, with a seeded order of what falls on the same moment."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

__all__ = ["TICK", "VirtualClock", "VirtualTimer"]

TICK = 1 / 1024
"""Seconds. Delays are multiples of it: sums of them are exact, and many events share a moment."""


class VirtualTimer:
    """A call at a virtual moment."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """Call it off; harmless when it has happened."""
        self.callback = None


class VirtualClock:
    """A queue of calls, earliest first.

    Args:
        order: decides among calls of the same moment; None keeps the order in which they were asked for.
    """

    def __init__(self, order: Random | None = None) -> None:
        self._now = 0.0
        self._order = order
        self._calls: list[tuple[float, float, int, VirtualTimer]] = []
        self._asked = 0

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def call_later(self, delay: float, callback: Callable[[], object], /) -> VirtualTimer:
        """Call `callback` once `delay` seconds have passed."""
        timer = VirtualTimer(callback)
        rank = self._order.random() if self._order else 0.0
        self._asked += 1
        heapq.heappush(self._calls, (self._now + max(delay, 0.0), rank, self._asked, timer))
        return timer

    def step(self, *, until: float = float("inf")) -> bool:
        """Make the next call that is due by `until`; False if there is none."""
        while self._calls and self._calls[0][0] <= until:
            moment, _, _, timer = heapq.heappop(self._calls)
            if timer.callback is None:
                continue
            callback, timer.callback = timer.callback, None
            self._now = moment
            callback()
            return True
        return False

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass, with all that happens meanwhile."""
        until = self._now + seconds
        while self.step(until=until):
            pass
        self._now = until

    @property
    def waiting(self) -> int:
        """Calls that are still to come."""
        return sum(timer.callback is not None for *_, timer in self._calls)
