"""A drive made slower on purpose: a bound on bytes per second and a latency, exact over many reads.

With it the daemon's own share of the time can be measured apart from a disk's noise, and drives of unequal speed can
be had on one machine.
"""

from __future__ import annotations

import threading
import time

from tierd.devices.device import RecordRead
from tierd.devices.transfers import Transfer
from tierd.errors import UsageError

__all__ = ["Throttle"]


class Throttle:
    """A `TransferWrapper` by which all reads of a drive share one bound.

    Args:
        bytes_per_second: bandwidth of the drive as it shall appear; None leaves it alone.
        latency: seconds added to every transfer; transfers side by side wait side by side.

    Raises:
        UsageError: a bound that lets nothing through, or a negative latency.
    """

    def __init__(self, *, bytes_per_second: float | None = None, latency: float = 0.0) -> None:
        if (bytes_per_second is not None and not bytes_per_second > 0) or not latency >= 0:
            raise UsageError(f"a throttle of {bytes_per_second} bytes/s and {latency} s of latency is none")
        self._rate = bytes_per_second
        self._latency = latency
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._closed = threading.Event()

    def wrap(self, read: RecordRead, transfer: Transfer) -> Transfer:
        """See `TransferWrapper.wrap`."""
        del read

        def throttled(fd: int, buffers: list[memoryview], offset: int) -> int:
            due = self._reserve(sum(buffer.nbytes for buffer in buffers)) + self._latency
            count = transfer(fd, buffers, offset)
            # The schedule is kept from the reservations, so a late wake-up delays this read, not the next ones.
            self._closed.wait(max(0.0, due - time.monotonic()))
            return count

        return throttled

    def close(self) -> None:
        """Nobody waits any longer."""
        self._closed.set()

    def _reserve(self, nbytes: int) -> float:
        now = time.monotonic()
        if self._rate is None:
            return now
        with self._lock:
            self._free_at = max(now, self._free_at) + nbytes / self._rate
            return self._free_at
