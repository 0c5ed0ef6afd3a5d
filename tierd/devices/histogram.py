"""Counts of durations in fixed buckets, cheap enough to keep for every read."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

__all__ = ["READ_SECONDS", "Histogram"]

READ_SECONDS: Final = (
    100e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 1.0, 10.0,
)  # fmt: skip
"""Upper bounds for reads of records: 4 KiB from a fast drive to 19 MB from a failing one. Kept per drive, so few."""


class Histogram:
    """Durations by bucket.

    Args:
        bounds: upper bounds in seconds, rising; what is longer goes into a last bucket.

    Attributes:
        bounds: as given.
        counts: durations per bucket, one more than there are bounds.
        total: sum of all durations in seconds.
    """

    def __init__(self, bounds: tuple[float, ...] = READ_SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """One more duration; a bound belongs to its bucket."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Durations up to each bound, as Prometheus writes them: ("0.001", 17), …, ("+Inf", 20)."""
        below, rows = 0, []
        for bound, count in zip((*(str(b) for b in self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            rows.append((bound, float(below)))
        return rows
