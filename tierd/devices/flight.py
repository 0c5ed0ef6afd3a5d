"""One record on its way: the attempts to read it, on one drive after the other or side by side.

Every attempt that may still write has a slot of its own. The record is delivered by the first attempt that ends well;
the others are withdrawn, or their slots abandoned until their system calls return. The read fails only when every
attempt has ended and nothing is left to try.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from tierd.clock import Clock, Timer
from tierd.devices.alarms import Alarm, Alarms
from tierd.devices.device import AttemptMemory, ReadDone, RecordRead
from tierd.devices.drive import Drive
from tierd.devices.failure import MAX_RETRIES, is_transient, retry_delay, verdict
from tierd.devices.hedging import HedgeBudget, Judgement, Patience
from tierd.devices.speed import Expectation
from tierd.errors import DriveError

__all__ = ["Fleet", "Flight"]

_NO_SPARE_WAIT: Final = 0.1
_SECOND_LOOK: Final = 0.002


class Fleet(Protocol):
    """What a flight asks of the drives as a whole."""

    clock: Clock
    alarms: Alarms
    budget: HedgeBudget
    closing: bool

    def pick(self, read: RecordRead, tried: Collection[str], *, sound: bool = False) -> Drive | None:
        """The best drive for the record among those not tried; with `sound`, only one that nothing speaks against."""

    def pick_again(self, names: Collection[str]) -> Drive | None:
        """The best of these drives, if any is still there."""

    def heard(self, drive: Drive, read: RecordRead, error: DriveError | None) -> None:
        """An attempt ended."""

    def stalled(self, drive: Drive) -> None:
        """An attempt was not answered in time, and nothing else was meanwhile."""

    def failed(self, read: RecordRead, error: DriveError) -> None:
        """No drive could give the record."""

    def ended(self, flight: Flight) -> None:
        """The flight's last attempt has returned."""


@dataclass(slots=True, eq=False)
class _Attempt:
    drive: Drive
    slot: int
    expected: Expectation
    patience: Patience
    hedge: bool
    stalled: bool = False
    looked: bool = False
    alarm: Alarm | None = None


class Flight:
    """A record wanted by the broker, until its last system call has returned.

    Attributes:
        first_slot: the slot that the broker gave.
    """

    __slots__ = (
        "_ahead", "_done", "_errors", "_fleet", "_idle", "_memory", "_over", "_read", "_retries", "_retry_timer",
        "_running", "_tried", "first_slot",
    )  # fmt: skip

    def __init__(
        self, fleet: Fleet, read: RecordRead, slot: int, memory: AttemptMemory, done: ReadDone, *, ahead: bool = False
    ) -> None:
        self.first_slot = slot
        self._fleet = fleet
        self._read = read
        self._memory = memory
        self._done = done
        self._running: dict[int, _Attempt] = {}
        self._idle = [slot]
        """Slots of this flight into which no call runs."""
        self._errors: dict[str, DriveError] = {}
        self._tried: set[str] = set()
        self._retries = 0
        self._retry_timer: Timer | None = None
        self._over = False
        self._ahead = ahead

    def start(self) -> None:
        """Begin the first attempt."""
        self._go_on()

    def leave(self, drive: Drive) -> None:
        """Take back what the drive has not begun, if another drive can have it."""
        for attempt in list(self._running.values()):
            if attempt.drive is drive:
                self._take_back(attempt)

    def promote(self) -> None:
        """Somebody waits from now on: drives do what is wanted first, and are looked after when they do not."""
        if not self._ahead:
            return
        self._ahead = False
        now = self._fleet.clock.time()
        for attempt in self._running.values():
            attempt.drive.device.promote(attempt.slot)
            if attempt.stalled:
                continue
            attempt.expected = attempt.drive.speed.promoted(attempt.expected, now)
            attempt.patience = Patience(attempt.drive.speed, attempt.expected)
            if attempt.alarm is not None:
                attempt.alarm.cancel()
            attempt.looked = False
            self._look_at(attempt, attempt.patience.next_look)

    def withdraw(self) -> bool:
        """End the flight if its only attempt has not begun; the first slot is the caller's then."""
        attempts = list(self._running.values())
        if self._over or self._idle or len(attempts) != 1 or attempts[0].slot != self.first_slot:
            return False
        if not self._withdraw(attempts[0]):
            return False
        self._finish()
        self._fleet.ended(self)
        return True

    def give_up(self) -> None:
        """No more retries: fail now if nothing is running."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
            self._retries = MAX_RETRIES
            self._go_on()

    # Attempts.

    def _launch(self, drive: Drive, *, hedge: bool = False) -> None:
        now, nbytes = self._fleet.clock.time(), self._read.nbytes
        expected = drive.speed.submitted(nbytes, now)
        patience = Patience(drive.speed, expected, waited=not self._ahead)
        attempt = _Attempt(drive, self._idle.pop(), expected, patience, hedge)
        self._tried.add(drive.name)
        self._running[attempt.slot] = attempt
        self._look_at(attempt, patience.next_look)
        landed = partial(self._landed, attempt)
        drive.device.submit(self._read, attempt.slot, self._memory, landed, ahead=self._ahead)

    def _look_at(self, attempt: _Attempt, moment: float) -> None:
        attempt.alarm = self._fleet.alarms.at(moment, partial(self._look, attempt))

    def _landed(self, attempt: _Attempt, error: DriveError | None, slot: int) -> None:
        drive = attempt.drive
        del self._running[slot]
        if attempt.alarm is not None:
            attempt.alarm.cancel()
        if attempt.stalled:
            drive.hanging -= 1
        else:
            now = self._fleet.clock.time()
            drive.speed.completed(attempt.expected, now, good=error is None, waited=not self._ahead)
        self._fleet.heard(drive, self._read, error)
        if self._over:
            self._memory.return_spare(slot)
            if not self._running:
                self._fleet.ended(self)
        elif error is None:
            self._deliver(attempt)
        else:
            if attempt.hedge:
                drive.device.stats.hedges_lost += 1
            self._errors.pop(drive.name, None)
            self._errors[drive.name] = error
            self._idle.append(slot)
            self._go_on(failed=drive)

    def _deliver(self, winner: _Attempt) -> None:
        self._finish()
        if winner.hedge:
            winner.drive.device.stats.hedges_won += 1
        for slot, attempt in list(self._running.items()):
            if attempt.hedge:
                attempt.drive.device.stats.hedges_lost += 1
            if self._withdraw(attempt):
                self._memory.return_spare(slot)
            else:
                self._memory.abandon(slot)
        for slot in self._idle:
            self._memory.return_spare(slot)
        self._idle.clear()
        if not self._running:
            self._fleet.ended(self)
        self._done(None, winner.slot)

    def _go_on(self, failed: Drive | None = None) -> None:
        """Use the idle slot: another drive, else a retry a moment later, else wait for what runs, else fail."""
        drive = self._fleet.pick(self._read, self._tried)
        if drive is not None:
            if failed is not None:
                failed.device.stats.failovers += 1
            self._launch(drive)
        elif any(not attempt.stalled for attempt in self._running.values()) or self._retry_timer is not None:
            return
        elif self._retries < MAX_RETRIES and self._may_pass() and not self._fleet.closing:
            self._retry_timer = self._fleet.clock.call_later(retry_delay(self._retries), self._retry)
            self._retries += 1
        elif not self._running:
            self._fail()

    def _may_pass(self) -> list[str]:
        return [name for name, error in self._errors.items() if is_transient(error)]

    def _retry(self) -> None:
        self._retry_timer = None
        drive = self._fleet.pick_again(self._may_pass()) if self._idle else None
        if drive is not None:
            drive.device.stats.retries += 1
            self._launch(drive)
        else:
            self._retries = MAX_RETRIES
            self._go_on()

    def _fail(self) -> None:
        self._finish()
        slot = self._idle.pop()
        for spare in self._idle:
            self._memory.return_spare(spare)
        self._idle.clear()
        self._fleet.ended(self)
        error = verdict(self._read, self._errors)
        self._fleet.failed(self._read, error)
        self._done(error, slot)

    def _finish(self) -> None:
        self._over = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None

    # Late and hanging attempts.

    def _look(self, attempt: _Attempt) -> None:
        """The attempt has not ended: it is late, or it hangs."""
        now = self._fleet.clock.time()
        attempt.alarm = None
        if attempt.stalled:
            self._rescue(attempt)
            return
        if not attempt.looked and now >= attempt.patience.next_look:
            # Whoever calls us may be late itself, with the answer already waiting behind this call.
            attempt.looked = True
            self._look_at(attempt, now + _SECOND_LOOK)
            return
        attempt.looked = False
        judgement = attempt.patience.judge(now)
        if judgement is Judgement.STALLED:
            self._stall(attempt)
            return
        if judgement is Judgement.LATE:
            self._hedge()
        self._look_at(attempt, attempt.patience.next_look)

    def _stall(self, attempt: _Attempt) -> None:
        attempt.stalled = True
        attempt.drive.hanging += 1
        attempt.drive.speed.dropped(attempt.expected)
        attempt.drive.device.stats.stalls += 1
        self._fleet.stalled(attempt.drive)
        if self._running.get(attempt.slot) is attempt:
            self._rescue(attempt)

    def _hedge(self) -> None:
        if self._over or len(self._running) != 1:
            return
        drive = self._fleet.pick(self._read, self._tried, sound=True)
        if drive is not None and (self._idle or self._fleet.budget.spend()) and self._take_spare():
            self._launch(drive, hedge=True)

    def _rescue(self, attempt: _Attempt) -> None:
        """A stalled attempt does not hold up the read: another drive gets it, in another slot."""
        if self._over or any(not other.stalled for other in self._running.values()):
            return
        drive = self._fleet.pick(self._read, self._tried)
        if drive is None:
            if self._idle:
                self._go_on()
        elif self._take_spare():
            attempt.drive.device.stats.failovers += 1
            self._launch(drive)
        else:
            self._look_at(attempt, self._fleet.clock.time() + _NO_SPARE_WAIT)

    def _take_spare(self) -> bool:
        if not self._idle:
            spare = self._memory.take_spare(self._read.expert)
            if spare is not None:
                self._idle.append(spare)
        return bool(self._idle)

    def _take_back(self, attempt: _Attempt) -> None:
        drive = None if self._over else self._fleet.pick(self._read, self._tried)
        if drive is None or not self._withdraw(attempt):
            return
        self._idle.append(attempt.slot)
        if attempt.hedge:
            attempt.drive.device.stats.hedges_lost += 1
        attempt.drive.device.stats.failovers += 1
        self._launch(drive)

    def _withdraw(self, attempt: _Attempt) -> bool:
        if not attempt.drive.device.withdraw(attempt.slot):
            return False
        del self._running[attempt.slot]
        if attempt.alarm is not None:
            attempt.alarm.cancel()
        if attempt.stalled:
            attempt.drive.hanging -= 1
        else:
            attempt.drive.speed.dropped(attempt.expected)
        return True
