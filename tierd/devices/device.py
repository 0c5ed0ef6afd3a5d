"""What the broker needs of a drive, and nothing more.

Real files, throttles, fault injectors and the simulation's virtual drive all stand behind `Device`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tierd.devices.failure import error_kind
from tierd.devices.histogram import Histogram
from tierd.errors import ChecksumMismatch, DriveError

__all__ = ["AttemptMemory", "Device", "DeviceStats", "ReadDone", "ReadWatch", "RecordRead"]


@dataclass(frozen=True, slots=True)
class RecordRead:
    """One attempt to read one expert's record.

    Attributes:
        expert: flat expert number, for replica choice.
        layer: model layer, for messages.
        index: expert number within the layer, for messages.
        shard: number of the experts shard that holds the record.
        offset: first byte of the record in the shard, a multiple of 4096.
        nbytes: length of the record, a multiple of 4096.
        xxh3: xxh3-64 of the record.
    """

    expert: int
    layer: int
    index: int
    shard: int
    offset: int
    nbytes: int
    xxh3: int


ReadDone = Callable[[DriveError | None, int], None]
"""Called exactly once per submitted read, on the broker's thread, with the error or None and with a slot.

Without an error that slot holds the verified bytes. With one it is the slot to give back. In both cases its last
system call has returned, and it is the caller's again. It may be another slot than the one that was submitted.
"""


ReadWatch = Callable[[str, RecordRead, float, float, int, DriveError | None], None]
"""Told of a read that ended: drive, read, seconds in the queue, seconds at work, bytes moved, error or None."""


class AttemptMemory(Protocol):
    """The arena as a device sees it. A read cannot be called back, so every attempt needs a slot of its own.

    The first attempt has the slot that came with `Device.submit`; a retry or hedge beside a running attempt takes a
    spare one. For each spare slot taken, one slot of the same expert comes back through `return_spare`: the spare one
    itself, or the first one if the spare one was handed to `ReadDone`.
    """

    def view(self, slot: int, nbytes: int) -> memoryview:
        """The writable memory of a filling slot, page-aligned."""

    def take_spare(self, expert: int) -> int | None:
        """A spare slot, into which a read of `expert` begins; None when all are in use."""

    def abandon(self, slot: int) -> None:
        """Nobody waits for what comes into the filling slot any more, but a system call may still write to it."""

    def return_spare(self, slot: int) -> None:
        """The filling or abandoned slot's last system call has returned: it is free, and a spare one is at hand."""


@dataclass(slots=True)
class DeviceStats:
    """Counted where the bytes move; read by metrics. Changed on the broker's thread only.

    Attributes:
        reads: record reads that ended well.
        bytes: bytes that system calls moved into memory, for reads that failed afterwards as well.
        errors: reads that ended in an error, checksum failures included.
        errors_by: the same by `tierd.devices.failure.error_kind`.
        checksum_failures: reads whose bytes were not the converted ones.
        read_seconds: sum of the time inside reads, checksum included.
        queue_seconds: sum of the time between submit and the start of a read.
        durations: the time inside reads, one by one.
        in_flight: reads submitted and not yet done.
        direct: whether reads bypass the page cache.
        retries: reads tried again on this drive.
        stalls: reads that this drive did not answer in time.
        failovers: reads that failed or stalled here and went on to another drive.
        hedges_won: reads begun here because another drive was late, and done first.
        hedges_lost: the same, done second.
        up: whether reads go to this drive as a matter of course.
    """

    reads: int = 0
    bytes: int = 0
    errors: int = 0
    errors_by: dict[str, int] = field(default_factory=dict)
    checksum_failures: int = 0
    read_seconds: float = 0.0
    queue_seconds: float = 0.0
    durations: Histogram = field(default_factory=Histogram)
    in_flight: int = 0
    direct: bool = False
    retries: int = 0
    stalls: int = 0
    failovers: int = 0
    hedges_won: int = 0
    hedges_lost: int = 0
    up: bool = True

    def ended(self, error: DriveError | None, *, queued: float, reading: float, moved: int) -> None:
        """A read ended.

        Args:
            error: or None.
            queued: seconds between submit and its start.
            reading: seconds from there to its end.
            moved: bytes.
        """
        self.in_flight -= 1
        self.queue_seconds += queued
        self.read_seconds += reading
        self.durations.observe(reading)
        self.bytes += moved
        if error is None:
            self.reads += 1
        else:
            kind = error_kind(error)
            self.errors += 1
            self.errors_by[kind] = self.errors_by.get(kind, 0) + 1
            self.checksum_failures += isinstance(error, ChecksumMismatch)


@runtime_checkable
class Device(Protocol):
    """Reads records into memory. Implementations never publish, retry for ever, or touch memory after `done`."""

    name: str

    @property
    def stats(self) -> DeviceStats:
        """Its counters now."""

    def submit(
        self, read: RecordRead, slot: int, memory: AttemptMemory, done: ReadDone, *, ahead: bool = False
    ) -> None:
        """Start reading `read.nbytes` bytes into the filling `slot` of `memory` and return at once.

        A read `ahead` is one that nobody waits for yet. It begins when nothing else is at work, few of them at a time,
        and at the very moment, or a moment before the only read at work will probably end: a drive that reads ahead has
        no pauses in which it waits for the next one. It may wait for long, since whatever is submitted meanwhile goes
        first; see `promote`.

        The record's checksum is verified off the broker's thread before `done(None, slot)` is called. Every failure, a
        short read and a vanished file included, arrives as a `DriveError` in `done`, with path, offset and length.
        """

    def promote(self, slot: int) -> None:
        """Somebody waits from now on for the read into `slot` that was submitted as one ahead.

        If it has not begun it goes before all reads ahead, and behind what is wanted already. If it has, it is from now
        on at work like any other. Harmless for a read that is wanted already, or has ended.
        """

    def withdraw(self, slot: int) -> bool:
        """Take back the read into `slot` if it has not begun.

        Returns:
            True if so: its `done` is never called, and the slot is the caller's. False if it has begun or ended.
        """

    def close(self) -> None:
        """Wait for reads in flight, then give back threads and descriptors."""
