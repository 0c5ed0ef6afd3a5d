"""How fast a drive is now, learned from its reads; pure, time comes in as an argument.

Bandwidth is bytes over the time in which the drive had anything to do, so it is right for one read at a time and for
many side by side. What reads take beyond that is its latency. How far real reads exceed the prediction, as a ratio, is
remembered for the last reads: the 99th percentile says when a read is late, whatever its size and the queue before it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["DEFAULT_BANDWIDTH", "DriveSpeed", "Expectation"]

DEFAULT_BANDWIDTH: Final = 1e9
"""Bytes per second of a drive that nobody has measured yet; its first reads correct it."""

_PRIOR_READS: Final = 4.0
_DECAY: Final = 0.95
_EXCESSES: Final = 5
_STALE_SECONDS: Final = 1.0
_STALE_WEIGHT: Final = 0.25
"""What a drive did long ago says less than what it does now."""
_RATIOS: Final = 256
_MIN_RATIOS: Final = 32
_NEWS: Final = 16
"""Reads after which the percentile is found anew: sorting costs more than all the rest."""


class Expectation:
    """What was predicted when a read was submitted.

    Attributes:
        nbytes: of the read.
        at: moment of submission.
        seconds: predicted until it is done.
        queued: bytes to move until then, its own and those queued before it.
    """

    __slots__ = ("at", "nbytes", "queued", "seconds")

    def __init__(self, nbytes: int, at: float, queued: int, seconds: float) -> None:
        self.nbytes = nbytes
        self.at = at
        self.queued = queued
        self.seconds = seconds


class DriveSpeed:
    """The running estimate of one drive.

    Args:
        bandwidth: bytes per second, as a probe measured it.
        weight: how much of the bandwidth to count on.

    Attributes:
        bandwidth: bytes per second to count on, the operator's weight included.
        queued_bytes: submitted and not ended.
        latency: median of the recent seconds per read beyond the transfer.
        last_completion: moment of the last read that ended, -inf before.
    """

    def __init__(self, bandwidth: float = DEFAULT_BANDWIDTH, weight: float = 1.0) -> None:
        self.queued_bytes = 0
        self.latency = 0.0
        self.last_completion = float("-inf")
        self.bandwidth = bandwidth * weight
        self._weight = weight
        self._bandwidth = bandwidth
        self._bytes = 0.0
        self._busy = 0.0
        self._pending = 0
        self._busy_since = 0.0
        self._idle_since: float | None = None
        self._excesses: deque[float] = deque([0.0] * (_EXCESSES // 2), maxlen=_EXCESSES)
        self._ratios: deque[float] = deque(maxlen=_RATIOS)
        self._slowest: float | None = None
        self._news = 0

    def predict(self, nbytes: int) -> float:
        """Seconds until a read submitted now would be done."""
        return (self.queued_bytes + nbytes) / self.bandwidth + self.latency

    def idle_for(self, now: float) -> float:
        """Seconds since the drive last had anything to do; the first call begins to count."""
        if self._pending:
            return 0.0
        if self._idle_since is None:
            self._idle_since = now
        return now - max(self._idle_since, self.last_completion)

    def submitted(self, nbytes: int, now: float) -> Expectation:
        """A read begins to wait."""
        if not self._pending:
            self._busy_since = now
        self._pending += 1
        self.queued_bytes += nbytes
        return self._expect(nbytes, now)

    def promoted(self, expected: Expectation, now: float) -> Expectation:
        """A read that had let others pass is wanted now: what to expect of it from here, in place of what was."""
        return self._expect(expected.nbytes, now)

    def _expect(self, nbytes: int, now: float) -> Expectation:
        queued = self.queued_bytes
        return Expectation(nbytes, now, queued, queued / self.bandwidth + self.latency)

    def dropped(self, expected: Expectation) -> None:
        """A read was withdrawn, or hangs: it says nothing of the bandwidth and is in nobody's way."""
        self._pending -= 1
        self.queued_bytes -= expected.nbytes

    def completed(self, expected: Expectation, now: float, *, good: bool, waited: bool = True) -> None:
        """A read ended; only good ones teach.

        Args:
            expected: what was predicted for it.
            now: the moment.
            good: whether it ended well.
            waited: whether somebody waited for it. Else others passed it, and how long it took says nothing.
        """
        self.dropped(expected)
        busy, self._busy_since = now - self._busy_since, now
        stale = now - self.last_completion > _STALE_SECONDS
        self.last_completion = now
        if not good:
            return
        if stale:
            self._bytes *= _STALE_WEIGHT
            self._busy *= _STALE_WEIGHT
            self._excesses.clear()
        nbytes = float(expected.nbytes)
        if not self._bytes:
            self._bytes = _PRIOR_READS * nbytes
            self._busy = self._bytes / self._bandwidth
        self._bytes = self._bytes * _DECAY + nbytes
        self._busy = self._busy * _DECAY + max(busy, 0.0)
        self._bandwidth = self._bytes / max(self._busy, 1e-9)
        self.bandwidth = self._bandwidth * self._weight
        if not waited:
            return
        # Against the bandwidth as it is now: what made that worse must not count twice.
        self._excesses.append(max(0.0, now - expected.at - expected.queued / self.bandwidth))
        self.latency = sorted(self._excesses)[len(self._excesses) // 2]
        self._ratios.append((now - expected.at) / max(expected.seconds, 1e-9))
        self._news += 1

    @property
    def p99(self) -> float | None:
        """99th percentile of real over predicted time of the recent reads, some reads old; None while too few."""
        if len(self._ratios) < _MIN_RATIOS:
            return None
        if self._slowest is None or self._news >= _NEWS:
            self._slowest = sorted(self._ratios)[len(self._ratios) * 99 // 100]
            self._news = 0
        return self._slowest
