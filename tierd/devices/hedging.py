"""When a read is late and when it hangs, and how many extra reads that may cost; pure.

A hedge is a second read of the same record on another drive, begun when the first is slower than 99 of 100 recent
reads of its drive were (Dean and Barroso, "The Tail at Scale", 2013). The budget keeps hedges from becoming the load.
"""

from __future__ import annotations

from typing import Final

from tierd.devices.speed import DriveSpeed, Expectation

__all__ = ["HedgeBudget", "late_after", "stalled_after"]

_FLOOR_LATE: Final = 0.005
_MARGIN_LATE: Final = 1.25
_FLOOR_STALLED: Final = 0.5
_FLOOR_UNKNOWN: Final = 0.75
_SHARE: Final = 0.05
_BURST: Final = 4.0


def late_after(speed: DriveSpeed, expected: Expectation) -> float | None:
    """Seconds after which a read is hedged; None while the drive's habits are not known."""
    p99 = speed.p99
    return None if p99 is None else max(_FLOOR_LATE, _MARGIN_LATE * p99 * expected.seconds)


def stalled_after(speed: DriveSpeed, expected: Expectation) -> float:
    """Seconds after which a read is taken to hang: under a second, or well beyond what the drive ever needed."""
    p99 = speed.p99
    if p99 is None:
        return max(_FLOOR_UNKNOWN, 8.0 * expected.seconds)
    return max(_FLOOR_STALLED, 4.0 * p99 * expected.seconds)


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
