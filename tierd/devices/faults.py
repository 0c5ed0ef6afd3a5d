"""A drive that fails as a plan says: errors, short reads, flipped bits, delays, hangs, a vanished device.

It stands around the system call, below the checksum, so its faults meet the code that real ones meet.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from tierd.devices.device import RecordRead
from tierd.devices.fault_plan import FaultPlan, FaultRule
from tierd.devices.transfers import Transfer

__all__ = ["FaultInjector"]

_FOR_EVER: Final = 86400.0
_BLOCK: Final = 4096


class FaultInjector:
    """A `TransferWrapper` for one drive.

    Args:
        plan: shared by all drives of a daemon.
        drive: name of this one.
        clock: seconds; the plan's run begins now.

    Attributes:
        bytes: that passed through, for comparison with what the drive counts.
        injected: faults by kind.
    """

    def __init__(self, plan: FaultPlan, drive: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes = 0
        self.injected: Counter[str] = Counter()
        self._plan = plan
        self._drive = drive
        self._clock = clock
        self._started = clock()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def wrap(self, read: RecordRead, transfer: Transfer) -> Transfer:
        """See `TransferWrapper.wrap`: the faults are decided once for each attempt."""
        with self._lock:
            faults = self._plan.decide(self._drive, read, self._clock() - self._started)
            self.injected.update(fault.kind for fault in faults)
        if not faults:
            return self._counted(transfer)
        return self._counted(_Faulty(faults, transfer, read.nbytes, self._closed))

    def close(self) -> None:
        """End delays and hangs."""
        self._closed.set()

    def _counted(self, transfer: Transfer) -> Transfer:
        def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
            count = transfer(fd, buffers, offset)
            with self._lock:
                self.bytes += count
            return count

        return counted


class _Faulty:
    """The transfers of one unlucky attempt."""

    def __init__(self, faults: list[FaultRule], transfer: Transfer, nbytes: int, closed: threading.Event) -> None:
        self._faults = faults
        self._transfer = transfer
        self._half = nbytes // 2 // _BLOCK * _BLOCK
        self._closed = closed
        self._moved = 0

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        for fault in self._faults:
            self._before(fault)
        kinds = {fault.kind for fault in self._faults}
        if "short" in kinds:
            if self._moved >= self._half:
                return 0
            buffers = [buffers[0][: self._half - self._moved]]
        count = self._transfer(fd, buffers, offset)
        if "flip" in kinds and count and not self._moved:
            buffers[0][count // 2] ^= 0x10
        self._moved += count
        return count

    def _before(self, fault: FaultRule) -> None:
        """What happens before, or instead of, the system call."""
        match fault.kind:
            case "eio":
                raise OSError(fault.error_number, os.strerror(fault.error_number))
            case "vanish":
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
            case "delay":
                self._closed.wait(fault.seconds)
            case "hang":
                if self._closed.wait(fault.seconds or _FOR_EVER):
                    raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
