"""Many moments on one timer of a clock.

Nearly every read ends long before anybody has to look after it. A timer of the event loop for each costs more than all
else that is kept in mind of it; here a moment that passes in peace costs a place in a heap.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final

from tierd.clock import Clock, Timer

__all__ = ["Alarm", "Alarms"]

_GRAIN: Final = 0.001
"""Clocks that count milliseconds have reached the moment so much later."""
_SLACK: Final = 64


class Alarm:
    """One moment."""

    __slots__ = ("_alarms", "callback")

    def __init__(self, alarms: Alarms, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback
        self._alarms = alarms

    def cancel(self) -> None:
        """Call it off; harmless when it has happened."""
        if self.callback is not None:
            self.callback = None
            self._alarms.waiting -= 1


class Alarms:
    """Calls at moments, none of them early, each a millisecond or two late.

    Alarms that were called off stay in the heap until their moment, or until they are more than the others.

    Args:
        clock: time, and the one timer.

    Attributes:
        waiting: alarms that are still to come.
    """

    def __init__(self, clock: Clock) -> None:
        self.waiting = 0
        self._clock = clock
        self._heap: list[tuple[float, int, Alarm]] = []
        self._number = 0
        self._timer: Timer | None = None
        self._rings_at = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, moment: float, callback: Callable[[], object]) -> Alarm:
        """Call `callback` at `moment` on the clock, or now if that has passed; never before this returns."""
        alarm = Alarm(self, callback)
        self.waiting += 1
        self._number += 1
        heappush(self._heap, (moment, self._number, alarm))
        if len(self._heap) > 2 * self.waiting + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapify(self._heap)
        if self._timer is None or moment < self._rings_at:
            self._set(moment)
        return alarm

    def rest(self) -> None:
        """Give the timer back if nothing is to come; the next alarm sets it again."""
        if self._timer is not None and not self.waiting:
            self._timer.cancel()
            self._timer = None
            self._heap.clear()

    def _set(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at = moment
        self._timer = self._clock.call_later(max(0.0, moment - self._clock.time()) + _GRAIN, self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = self._clock.time()
        due: list[Alarm] = []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].callback is None):
            due.append(heappop(self._heap)[2])
        if self._heap:
            self._set(self._heap[0][0])
        for alarm in due:
            callback = alarm.callback
            if callback is not None:
                alarm.cancel()
                callback()
