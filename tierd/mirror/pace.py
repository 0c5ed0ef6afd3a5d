"""A bound on bytes per second for work that must not get in the way of reads that somebody waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from tierd.errors import UsageError

__all__ = ["Pace"]

_MAX_BURST_SECONDS: Final = 0.1


class Pace:
    """Call it with the bytes of each step; it sleeps as long as needed.

    Args:
        bytes_per_second: the bound; None for none.
        clock: seconds, rising.
        sleep: waits so many seconds.

    Raises:
        UsageError: a bound that lets nothing through.
    """

    def __init__(
        self,
        bytes_per_second: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise UsageError(f"a rate of {bytes_per_second} bytes per second lets nothing through")
        self._rate = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._due = clock()

    def __call__(self, nbytes: int) -> None:
        """So many bytes were moved."""
        if self._rate is None:
            return
        now = self._clock()
        # Time in which nothing was moved is not saved up, but for a moment.
        self._due = max(self._due, now - _MAX_BURST_SECONDS) + nbytes / self._rate
        if self._due > now:
            self._sleep(self._due - now)
