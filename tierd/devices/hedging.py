"""When a read is late and when it hangs, and how many extra reads that may cost; pure.

A hedge is a second read of the same record on another drive, begun when the first is slower than 99 of 100 recent
reads of its drive were (Dean and Barroso, "The Tail at Scale", 2013). The budget keeps hedges from becoming the load.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Final

from tierd.devices.speed import DriveSpeed, Expectation

__all__ = ["HedgeBudget", "Judgement", "Patience", "late_after", "quiet_after", "stalled_after"]

_FLOOR_LATE: Final = 0.005
_MARGIN_LATE: Final = 1.25
_FLOOR_STALLED: Final = 0.5
_FLOOR_UNKNOWN: Final = 0.75
_SHARE: Final = 0.05
_BURST: Final = 4.0


def late_after(p99: float | None, seconds: float) -> float:
    """Seconds after which a read that was predicted to take `seconds` is hedged.

    Args:
        p99: of its drive, see `DriveSpeed.p99`. Without it, while the drive's habits are not known, that is never.
        seconds: predicted, the queue before it included.
    """
    return math.inf if p99 is None else max(_FLOOR_LATE, _MARGIN_LATE * p99 * seconds)


def stalled_after(p99: float | None, seconds: float) -> float:
    """Seconds after which such a read is taken to hang; see `late_after`."""
    return max(_FLOOR_UNKNOWN, 8.0 * seconds) if p99 is None else max(_FLOOR_STALLED, 4.0 * p99 * seconds)


def quiet_after(p99: float | None, seconds: float) -> float:
    """Seconds without any read ending after which a busy drive is taken to hang, however long its queue is.

    Args:
        p99: see `late_after`.
        seconds: predicted for the read without a queue.
    """
    floor, usual = (_FLOOR_UNKNOWN, 1.0) if p99 is None else (_FLOOR_STALLED, max(p99, 1.0))
    return max(floor, 10.0 * usual * seconds)


class Judgement(Enum):
    """What to think of a read that has not ended."""

    WAIT = "wait"
    LATE = "late"
    STALLED = "stalled"


class Patience:
    """How long one read on one drive is waited for.

    Args:
        speed: of the drive.
        expected: of the read.
        waited: whether somebody waits for it. One that nobody waits for lets others pass for as long as there are any:
            it is never late, and only a drive that ends nothing at all hangs.
    """

    __slots__ = ("_bound", "_late_at", "_overdue_at", "_quiet", "_reprieved", "_since", "_speed")

    def __init__(self, speed: DriveSpeed, expected: Expectation, *, waited: bool = True) -> None:
        since, seconds, p99 = expected.at, expected.seconds, speed.p99
        self._speed = speed
        self._since = since
        self._late_at = since + late_after(p99, seconds) if waited else math.inf
        self._bound = stalled_after(p99, seconds) if waited else math.inf
        self._overdue_at = since + self._bound
        self._quiet = quiet_after(p99, expected.nbytes / speed.bandwidth + speed.latency)
        self._reprieved = False

    @property
    def next_look(self) -> float:
        """The moment at which `judge` may say something new."""
        return min(self._late_at, self._overdue_at, self._silent_at)

    @property
    def _silent_at(self) -> float:
        return max(self._since, self._speed.last_completion) + self._quiet

    def judge(self, now: float) -> Judgement:
        """Called at `next_look` or later, while the read has not ended."""
        if now >= self._silent_at:
            return Judgement.STALLED
        if now >= self._overdue_at:
            # The drive works, this read alone does not come: its queue may be longer than was thought, once.
            if self._reprieved:
                return Judgement.STALLED
            self._reprieved = True
            self._overdue_at = now + self._bound
            return Judgement.LATE
        if now >= self._late_at:
            self._late_at = math.inf
            return Judgement.LATE
        return Judgement.WAIT


class HedgeBudget:
    """One hedge for twenty reads, a few of them in a burst."""

    def __init__(self) -> None:
        self._tokens = _BURST

    def earn(self) -> None:
        """A read was submitted."""
        self._tokens = min(_BURST, self._tokens + _SHARE)

    def spend(self) -> bool:
        """Whether one more hedge is allowed; it is counted."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
