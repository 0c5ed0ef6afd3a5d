"""Several drives as one device: the best copy for each read, and another one when it fails, is late or hangs."""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

import structlog

from tierd.clock import Clock
from tierd.devices.alarms import Alarms
from tierd.devices.device import AttemptMemory, DeviceStats, ReadDone, RecordRead
from tierd.devices.drive import Drive
from tierd.devices.failure import blames_drive, blames_record, error_kind
from tierd.devices.flight import Flight
from tierd.devices.hedging import HedgeBudget
from tierd.devices.probing import Prober
from tierd.devices.replica_choice import Replica, choose
from tierd.errors import DriveError, UsageError

__all__ = ["ReplicaSet"]

_log = structlog.get_logger(__name__)

_SUMMED: Final = (
    "reads", "bytes", "errors", "checksum_failures", "read_seconds", "queue_seconds", "in_flight", "retries", "stalls",
    "failovers", "hedges_won", "hedges_lost",
)  # fmt: skip

_MAX_UNREADABLE: Final = 1024
"""Experts for which it is remembered that the log has named them."""


class ReplicaSet:
    """A `tierd.devices.device.Device` over drives that each hold all or some of the shards.

    Everything runs on the broker's thread. A single drive gains retries and a health of its own from it.

    Args:
        clock: for late and hanging reads, retries and probes.
        drives: the first members; names are unique.
        name: of the whole, for messages.

    Attributes:
        name: as given.
        clock: as given.
        alarms: for late and hanging reads.
        budget: of hedges.
        closing: nothing new begins.
    """

    def __init__(self, clock: Clock, drives: Sequence[Drive], *, name: str = "drives") -> None:
        self.name = name
        self.clock = clock
        self.alarms = Alarms(clock)
        self.budget = HedgeBudget()
        self._drives: dict[str, Drive] = {}
        self._prober = Prober(clock)
        self._flights: dict[int, Flight] = {}
        self._by_slot: dict[int, Flight] = {}
        self._unreadable: OrderedDict[int, None] = OrderedDict()
        self.closing = False
        for drive in drives:
            self.add(drive)

    def __repr__(self) -> str:
        return f"<ReplicaSet {', '.join(self._drives)}: {len(self._flights)} records on their way>"

    # Members.

    @property
    def drives(self) -> list[Drive]:
        """The members, those that are leaving included."""
        return list(self._drives.values())

    @property
    def stats(self) -> DeviceStats:
        """The members' counters, summed; `direct` if all are, `up` if any is. Durations stay with the members."""
        members = [drive.device.stats for drive in self._drives.values()]
        total = DeviceStats(direct=all(m.direct for m in members), up=any(m.up for m in members))
        for field in _SUMMED:
            setattr(total, field, sum(getattr(member, field) for member in members))
        for member in members:
            for kind, count in member.errors_by.items():
                total.errors_by[kind] = total.errors_by.get(kind, 0) + count
        return total

    def add(self, drive: Drive) -> None:
        """From now on reads may go to this drive, too.

        Raises:
            UsageError: a drive of that name is there already.
        """
        if drive.name in self._drives:
            raise UsageError(f"there is a drive called {drive.name} already")
        self._drives[drive.name] = drive
        for member in self._drives.values():
            if not member.health.usable:
                self._prober.schedule(member)

    def leave(self, name: str) -> Drive:
        """No new reads go to the drive; what it has begun goes on. Then call `forget`.

        Raises:
            UsageError: there is no such drive, or it holds shards that no other drive has.
        """
        drive = self._drives.get(name)
        if drive is None or drive.leaving:
            raise UsageError(f"there is no drive called {name}", hint=f"The drives are {', '.join(self._drives)}.")
        others = {
            s for other in self._drives.values() if other is not drive and not other.leaving for s in other.shards
        }
        alone = drive.shards - others
        if alone:
            raise UsageError(f"drive {name} holds {len(alone)} shards that no other drive has; it cannot be removed")
        drive.leaving = True
        self._move_away(drive)
        return drive

    def forget(self, drive: Drive) -> None:
        """The drive has left: it does not belong to the set any more. Close its device afterwards."""
        self._drives.pop(drive.name, None)

    # The device.

    def submit(
        self, read: RecordRead, slot: int, memory: AttemptMemory, done: ReadDone, *, ahead: bool = False
    ) -> None:
        """See `Device.submit`."""
        self.budget.earn()
        self._prober.memory = memory
        held = False
        for drive in self._drives.values():
            if drive.holds(read):
                held = True
                if drive.probe_read is None or drive.is_bad(drive.probe_read):
                    drive.probe_read = read
        if self.closing or not held:
            self.clock.call_later(0.0, partial(done, self._nowhere(read), slot))
            return
        flight = Flight(self, read, slot, memory, done, ahead=ahead)
        self._flights[id(flight)] = self._by_slot[slot] = flight
        flight.start()
        if len(self._drives) > 1:
            self._measure_neglected(read)

    def promote(self, slot: int) -> None:
        """See `Device.promote`."""
        flight = self._by_slot.get(slot)
        if flight is not None:
            flight.promote()

    def withdraw(self, slot: int) -> bool:
        """See `Device.withdraw`."""
        flight = self._by_slot.get(slot)
        return flight is not None and flight.withdraw()

    def end(self) -> None:
        """No new attempts: what runs ends by itself, or with the members' `close`."""
        self.closing = True
        self._prober.close()
        self.alarms.rest()
        for flight in list(self._flights.values()):
            flight.give_up()

    def close(self) -> None:
        """See `Device.close`."""
        self.end()
        for drive in self._drives.values():
            drive.device.close()

    def _nowhere(self, read: RecordRead) -> DriveError:
        subject = f"layer {read.layer}, expert {read.index}"
        if self.closing:
            return DriveError(f"{subject}: the drives are closed", errno=errno.ECANCELED)
        return DriveError(
            f"{subject}: no drive holds shard {read.shard}",
            offset=read.offset,
            length=read.nbytes,
            errno=errno.EINVAL,
            hint="Name the directory that has it with --mirror or --also.",
        )

    # What flights ask, see `tierd.devices.flight.Fleet`.

    def pick(self, read: RecordRead, tried: Collection[str], *, sound: bool = False) -> Drive | None:
        """The best drive for the record among those not tried; with `sound`, only one that nothing speaks against."""
        if self.closing:
            return None
        best: list[Drive] = []
        doubtful: list[Drive] = []
        for drive in self._drives.values():
            if drive.holds(read) and drive.name not in tried:
                (best if drive.health.usable and not drive.is_bad(read) else doubtful).append(drive)
        if not best and not sound:
            # A drive in doubt is better than no answer; the one that hangs or had wrong bytes comes last.
            best = [d for d in doubtful if not d.hanging and not d.is_bad(read)] or doubtful
        return self._fastest(read.expert, read.nbytes, best)

    def pick_again(self, names: Collection[str]) -> Drive | None:
        """The best of these drives, if any is still there."""
        if self.closing:
            return None
        there = [d for d in self._drives.values() if d.name in names and not d.leaving]
        return self._fastest(0, 0, [d for d in there if d.health.usable] or there)

    def heard(self, drive: Drive, read: RecordRead, error: DriveError | None) -> None:
        """An attempt ended: what that says of the drive."""
        if error is None:
            drive.mark_good(read)
            drive.look_soon()
            self._unreadable.pop(read.expert, None)
            if len(self._drives) == 1 and not drive.health.usable:
                # Nobody takes its reads over, so they show that it is well, and no probe is needed.
                drive.health.begin_probe(self.clock.time())
            drive.health.succeeded()
            drive.probe_read = read
        elif blames_drive(error):
            grave = blames_record(error) or error_kind(error) == "vanished"
            if blames_record(error):
                drive.mark_bad(read)
            else:
                drive.probe_read = read
            if drive.health.failed(self.clock.time(), grave=grave):
                self._quarantined(drive, error.message, error.hint)
        drive.device.stats.up = drive.health.usable

    def stalled(self, drive: Drive) -> None:
        """The drive does not answer: quarantine it, and save from it what it has not begun."""
        if drive.health.failed(self.clock.time(), grave=True):
            self._quarantined(drive, "reads do not return", "Look at the kernel's log and at the drive's cable.")
        drive.device.stats.up = drive.health.usable
        self._move_away(drive)

    def failed(self, read: RecordRead, error: DriveError) -> None:
        """No drive could give the record: say so, once until it has been read again."""
        if read.expert in self._unreadable or not blames_drive(error):
            return
        self._unreadable[read.expert] = None
        if len(self._unreadable) > _MAX_UNREADABLE:
            self._unreadable.popitem(last=False)
        _log.error(
            "expert cannot be read",
            layer=read.layer,
            expert=read.index,
            path=error.path,
            offset=error.offset,
            length=error.length,
            errno=error.errno,
            reason=error.message,
            advice=error.hint,
        )

    def ended(self, flight: Flight) -> None:
        """The flight's last attempt has returned."""
        self._flights.pop(id(flight), None)
        if self._by_slot.get(flight.first_slot) is flight:
            del self._by_slot[flight.first_slot]
        if self.closing:
            self.alarms.rest()

    def _measure_neglected(self, read: RecordRead) -> None:
        """A drive that was slow once and has not been chosen since would never be again without this."""
        now = self.clock.time()
        for drive in list(self._drives.values()):
            if drive.holds(read) and not drive.is_bad(read) and drive.due_for_measuring(now):
                self._prober.measure(drive, read)

    def _move_away(self, drive: Drive) -> None:
        for flight in list(self._flights.values()):
            flight.leave(drive)

    def _quarantined(self, drive: Drive, reason: str, hint: str) -> None:
        _log.warning(
            "drive quarantined", drive=drive.name, reason=reason, probe_in_seconds=drive.health.back_off, advice=hint
        )
        if len(self._drives) > 1:
            self._prober.schedule(drive)

    def _fastest(self, expert: int, nbytes: int, drives: Sequence[Drive]) -> Drive | None:
        if not drives:
            return None
        if len(drives) == 1:
            return drives[0]
        replicas = [Replica(d.key, d.speed.bandwidth, d.speed.predict(nbytes)) for d in drives]
        return drives[choose(expert, replicas)]
