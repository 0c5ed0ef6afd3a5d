"""A drive on the virtual clock: slow, out of order, failing, lying or hanging, as its seed says."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from simulation.clock import TICK, VirtualClock
from simulation.records import RECORD_BYTES, VirtualStore

from tierd.arena.arena import Arena
from tierd.devices.device import AttemptMemory, Device, DeviceStats, ReadDone, RecordRead
from tierd.errors import ChecksumMismatch, DriveError
from tierd.store.checksums import xxh3

__all__ = ["DriveHabits", "ObservedDevice", "Outstanding", "VirtualDrive"]

_GARBAGE = b"\xaa" * RECORD_BYTES


@dataclass(frozen=True, slots=True)
class DriveHabits:
    """How a drive behaves.

    Attributes:
        workers: reads at a time; the others wait in order.
        fastest: ticks of the fastest read.
        slowest: ticks of the slowest sound read.
        io_error: probability that a read ends in EIO.
        short: probability that a read ends early.
        flipped: probability that a read delivers a wrong bit.
        hang: probability that a read returns only after `hang_seconds`.
        hang_seconds: how late it returns then.
        at_once: probability that a read ends before `submit` returns, as on a drive known to be gone.
        damaged: probability that an expert's record is bad for good.
        shards: numbers of the shards that it holds; None for all.
    """

    workers: int = 4
    fastest: int = 1
    slowest: int = 8
    io_error: float = 0.0
    short: float = 0.0
    flipped: float = 0.0
    hang: float = 0.0
    hang_seconds: float = 60.0
    at_once: float = 0.0
    damaged: float = 0.0
    shards: tuple[int, ...] | None = None

    @property
    def faultless(self) -> bool:
        """Whether every read of an undamaged record ends well and in time."""
        return not (self.io_error or self.short or self.flipped or self.hang)


@dataclass(slots=True, eq=False)
class Outstanding:
    """A read that was submitted and whose last system call has not returned."""

    read: RecordRead
    slot: int
    into: memoryview = field(repr=False)
    done: ReadDone = field(repr=False)
    ahead: bool = False


class VirtualDrive:
    """A `tierd.devices.device.Device` whose reads take virtual time.

    From submit to return the memory belongs to the drive: it is filled with garbage at once, and with what was read at
    the end. So whoever shows or reuses the memory in between shows garbage or destroys a neighbour, and is found.

    Attributes:
        name: as given.
        stats: its counters.
        outstanding: reads submitted whose last system call has not returned.
        submitted: how many reads it was given; those that were withdrawn do not count.
        steady: it has belonged to the daemon all the time.
    """

    def __init__(
        self,
        name: str,
        *,
        store: VirtualStore,
        clock: VirtualClock,
        rng: Random,
        habits: DriveHabits,
        log: Callable[..., None],
    ) -> None:
        self.name = name
        self.stats = DeviceStats(direct=True)
        self.outstanding: list[Outstanding] = []
        self.submitted = 0
        self.steady = True
        self._store = store
        self._clock = clock
        self._rng = rng
        self._habits = habits
        self._log = log
        self._idle = habits.workers
        self._waiting: deque[Outstanding] = deque()
        self._ahead: deque[Outstanding] = deque()  # what nobody waits for, until nothing that is wanted is at work
        self._wanted = 0  # reads at work that somebody waits for
        self._damaged = {flat for flat in range(len(store)) if rng.random() < habits.damaged}

    def sound(self, flat: int) -> bool:
        """Whether this drive is sure to deliver the expert."""
        shards = self._habits.shards
        here = shards is None or self._store.record(flat).shard in shards
        return here and self.steady and flat not in self._damaged and self._habits.faultless

    def submit(
        self, read: RecordRead, slot: int, memory: AttemptMemory, done: ReadDone, *, ahead: bool = False
    ) -> None:
        """See `Device.submit`."""
        job = Outstanding(read, slot, memory.view(slot, read.nbytes), done, ahead)
        for other in self.outstanding:
            assert other.slot != job.slot, f"{job} goes into the slot of {other}"
        self._log("submit", self.name, read.expert, job.slot)
        self.submitted += 1
        self.stats.in_flight += 1
        self.outstanding.append(job)
        job.into[:] = _GARBAGE
        if self._rng.random() < self._habits.at_once:
            self._end(job)
        else:
            (self._ahead if ahead else self._waiting).append(job)
            self._start()

    def promote(self, slot: int) -> None:
        """See `Device.promote`."""
        job = next((job for job in self.outstanding if job.slot == slot and job.ahead), None)
        if job is None:
            return
        self._log("promoted", self.name, job.read.expert, slot)
        job.ahead = False
        if job in self._ahead:
            self._ahead.remove(job)
            self._waiting.append(job)
            self._start()
        else:
            self._wanted += 1

    def withdraw(self, slot: int) -> bool:
        """See `Device.withdraw`."""
        job = next((job for job in (*self._waiting, *self._ahead) if job.slot == slot), None)
        if job is None:
            return False
        self._log("withdrawn", self.name, job.read.expert, slot)
        (self._ahead if job.ahead else self._waiting).remove(job)
        self.outstanding.remove(job)
        self.submitted -= 1
        self.stats.in_flight -= 1
        return True

    def close(self) -> None:
        """Nothing to give back."""

    def _start(self) -> None:
        while self._idle and (self._waiting or (self._ahead and not self._wanted)):
            self._idle -= 1
            job, habits = (self._waiting or self._ahead).popleft(), self._habits
            self._wanted += not job.ahead
            delay = self._rng.randint(habits.fastest, habits.slowest) * TICK
            if self._rng.random() < habits.hang:
                delay += habits.hang_seconds
            self._clock.call_later(delay, lambda job=job: self._return(job))  # type: ignore[misc]

    def _return(self, job: Outstanding) -> None:
        self._idle += 1
        self._wanted -= not job.ahead
        self._end(job)
        self._start()

    def _end(self, job: Outstanding) -> None:
        error = self._deliver(job)
        self._log("returned", self.name, job.read.expert, job.slot, type(error).__name__)
        self.outstanding.remove(job)
        self.stats.in_flight -= 1
        self.stats.reads += error is None
        self.stats.bytes += job.read.nbytes
        self.stats.errors += error is not None
        job.done(error, job.slot)

    def _deliver(self, job: Outstanding) -> DriveError | None:
        """Bytes as this drive has them, and the judgement that a real drive's thread would pass on them."""
        read, habits, content = job.read, self._habits, self._store.content[job.read.expert]
        fate = self._rng.random()
        if fate < habits.io_error:
            return self._error(DriveError, read, "input/output error", errno.EIO)
        fate -= habits.io_error
        if fate < habits.short:
            job.into[: read.nbytes // 2] = content[: read.nbytes // 2]
            return self._error(DriveError, read, f"{read.nbytes // 2} bytes came")
        fate -= habits.short
        job.into[:] = content
        if fate < habits.flipped or read.expert in self._damaged:
            job.into[self._rng.randrange(read.nbytes)] ^= 1 << self._rng.randrange(8)
        if xxh3(job.into) != read.xxh3:
            self.stats.checksum_failures += 1
            return self._error(ChecksumMismatch, read, "the checksum is wrong")
        return None

    def _error(self, kind: type[DriveError], read: RecordRead, what: str, number: int = 0) -> DriveError:
        where = f"drive {self.name}, layer {read.layer}, expert {read.index}"
        return kind(f"{where}: {what}", path=self.name, offset=read.offset, length=read.nbytes, errno=number)


class ObservedDevice:
    """What the broker reads from, watched: one read of an expert at a time, and each ends once.

    Args:
        device: what is watched.
        memory: the arena.
        begun: called for each read that begins, with whether it is one ahead.

    Attributes:
        flying: experts that are being read, whatever that takes, and the slots that the broker gave for them.
    """

    def __init__(
        self, device: Device, memory: Arena, begun: Callable[[int, bool], None] = lambda _flat, _ahead: None
    ) -> None:
        self.name = device.name
        self.flying: dict[int, int] = {}
        self._begun = begun
        self._device = device
        self._memory = memory

    @property
    def stats(self) -> DeviceStats:
        """The device's."""
        return self._device.stats

    def submit(
        self, read: RecordRead, slot: int, memory: AttemptMemory, done: ReadDone, *, ahead: bool = False
    ) -> None:
        """Pass on, and remember."""
        flat = read.expert
        assert flat not in self.flying, f"expert {flat} is read twice at a time"
        self._begun(flat, ahead)
        self.flying[flat] = slot

        def ended(error: DriveError | None, slot: int) -> None:
            assert self.flying.pop(flat, None) is not None, f"a read of expert {flat} ended twice"
            expert = self._memory._states.expert(slot)
            assert expert == flat, f"a read of expert {flat} ended in the slot of {expert}"
            done(error, slot)

        self._device.submit(read, slot, memory, ended, ahead=ahead)

    def promote(self, slot: int) -> None:
        """Pass on."""
        self._device.promote(slot)

    def withdraw(self, slot: int) -> bool:
        """Pass on, and forget."""
        if not self._device.withdraw(slot):
            return False
        self.flying = {flat: given for flat, given in self.flying.items() if given != slot}
        return True

    def close(self) -> None:
        """Pass on."""
        self._device.close()
