"""Reads that nobody waits for: is a quarantined drive well again, and how fast is one that is never chosen?

They go into spare slots, are checked like all others, and are few.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from tierd.clock import Clock, Timer
from tierd.devices.device import AttemptMemory, RecordRead
from tierd.devices.drive import Drive
from tierd.devices.failure import blames_drive, blames_record, error_kind
from tierd.devices.hedging import stalled_after
from tierd.devices.speed import Expectation
from tierd.errors import DriveError

__all__ = ["Prober"]

_NO_SPARE_WAIT: Final = 0.25
_BETTER: Final = 0.7
"""Of the predicted time: a drive that needs less has changed, and is measured again soon."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Sample:
    drive: Drive
    read: RecordRead
    memory: AttemptMemory
    expected: Expectation
    timer: Timer | None = None
    stalled: bool = False


class Prober:
    """Probes drives when their back-off has passed. A probe that hangs is never joined by a second one.

    Args:
        clock: time.

    Attributes:
        memory: where spare slots come from; None before the first read.
    """

    def __init__(self, clock: Clock) -> None:
        self.memory: AttemptMemory | None = None
        self._clock = clock
        self._timers: dict[str, Timer] = {}
        self._closed = False

    def schedule(self, drive: Drive) -> None:
        """The drive was quarantined; probe it when its back-off has passed."""
        self._wait(drive, drive.health.probe_at - self._clock.time())

    def close(self) -> None:
        """No more probes."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _wait(self, drive: Drive, seconds: float) -> None:
        if self._closed:
            return
        if drive.name in self._timers:
            self._timers[drive.name].cancel()
        self._timers[drive.name] = self._clock.call_later(max(0.0, seconds), partial(self._probe, drive))

    def _probe(self, drive: Drive) -> None:
        self._timers.pop(drive.name, None)
        if drive.leaving or self._closed:
            return
        if drive.probing or drive.hanging or drive.probe_read is None:
            self._wait(drive, drive.health.back_off)
        elif not drive.health.begin_probe(self._clock.time()):
            if not drive.health.usable:
                self._wait(drive, _NO_SPARE_WAIT)
        elif not self._read(drive, drive.probe_read):
            drive.health.put_off()
            self._wait(drive, _NO_SPARE_WAIT)

    def measure(self, drive: Drive, read: RecordRead) -> None:
        """Read a record from a drive that is never chosen, to learn how fast it is now; nobody waits for it."""
        if not (drive.probing or drive.hanging or self._closed):
            self._read(drive, read)

    def _read(self, drive: Drive, read: RecordRead) -> bool:
        """Begin a read into a spare slot; False if none is to be had."""
        slot = self.memory.take_spare(read.expert) if self.memory is not None else None
        if slot is None or self.memory is None:
            return False
        drive.probing = True
        sample = _Sample(drive, read, self.memory, drive.speed.submitted(read.nbytes, self._clock.time()))
        bound = stalled_after(drive.speed.p99, sample.expected.seconds)
        sample.timer = self._clock.call_later(bound, partial(self._stalled, sample))
        drive.device.submit(read, slot, self.memory, partial(self._landed, sample))
        return True

    def _landed(self, sample: _Sample, error: DriveError | None, slot: int) -> None:
        drive = sample.drive
        sample.memory.return_spare(slot)
        drive.probing = False
        if sample.timer is not None:
            sample.timer.cancel()
        if not sample.stalled:
            now = self._clock.time()
            drive.speed.completed(sample.expected, now, good=error is None)
            if error is None and now - sample.expected.at < _BETTER * sample.expected.seconds:
                drive.look_soon()
        if error is None:
            drive.mark_good(sample.read)
            was_usable = drive.health.usable
            drive.health.succeeded()
            if drive.health.usable and not was_usable:
                _log.info("drive is well again", drive=drive.name)
        elif blames_drive(error):
            if blames_record(error):
                drive.mark_bad(sample.read)
            self._failed(drive, grave=blames_record(error) or error_kind(error) == "vanished")
        drive.device.stats.up = drive.health.usable

    def _stalled(self, sample: _Sample) -> None:
        sample.timer = None
        sample.stalled = True
        sample.drive.speed.dropped(sample.expected)
        sample.drive.device.stats.stalls += 1
        self._failed(sample.drive, grave=True)
        sample.drive.device.stats.up = sample.drive.health.usable

    def _failed(self, drive: Drive, *, grave: bool) -> None:
        if drive.health.failed(self._clock.time(), grave=grave):
            self.schedule(drive)
