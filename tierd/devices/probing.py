"""Finding out whether a quarantined drive is well again, by reading a record from it into a spare slot."""

from __future__ import annotations

from functools import partial
from typing import Final

import structlog

from tierd.clock import Clock, Timer
from tierd.devices.device import AttemptMemory, RecordRead
from tierd.devices.drive import Drive
from tierd.devices.failure import blames_record
from tierd.devices.hedging import stalled_after
from tierd.errors import DriveError

__all__ = ["Prober"]

_NO_SPARE_WAIT: Final = 0.25

_log = structlog.get_logger(__name__)


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
        if drive.probing or drive.hanging or self.memory is None or drive.probe_read is None:
            self._wait(drive, drive.health.back_off)
            return
        read = drive.probe_read
        slot = self.memory.take_spare(read.expert)
        if slot is None:
            self._wait(drive, _NO_SPARE_WAIT)
            return
        if not drive.health.begin_probe(self._clock.time()):
            self.memory.return_spare(slot)
            if not drive.health.usable:
                self._wait(drive, _NO_SPARE_WAIT)
            return
        drive.probing = True
        expected = drive.speed.submitted(read.nbytes, self._clock.time())
        bound = stalled_after(drive.speed, expected)
        drive.speed.dropped(expected)
        timer = self._clock.call_later(bound, partial(self._failed, drive))
        drive.device.submit(read, slot, self.memory, partial(self._landed, drive, read, self.memory, timer))

    def _landed(
        self, drive: Drive, read: RecordRead, memory: AttemptMemory, timer: Timer, error: DriveError | None, slot: int
    ) -> None:
        timer.cancel()
        memory.return_spare(slot)
        drive.probing = False
        if error is not None:
            if blames_record(error):
                drive.mark_bad(read)
            self._failed(drive)
            return
        drive.mark_good(read)
        drive.health.succeeded()
        drive.device.stats.up = drive.health.usable
        if drive.health.usable:
            _log.info("drive is well again", drive=drive.name)

    def _failed(self, drive: Drive) -> None:
        if drive.health.failed(self._clock.time(), grave=True):
            self.schedule(drive)
