"""What the broker needs of a drive, and nothing more.

Real files, throttles, fault injectors and the simulation's virtual drive all stand behind `Device`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tierd.errors import DriveError

__all__ = ["Device", "DeviceStats", "ReadDone", "RecordRead"]


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


ReadDone = Callable[[DriveError | None], None]
"""Called exactly once per submitted read, on the broker's thread, once no system call touches the memory."""


@dataclass(slots=True)
class DeviceStats:
    """Counted where the bytes move; read by metrics.

    Attributes:
        reads: system-level record reads that ended well.
        bytes: bytes of those reads.
        errors: reads that ended in an error, checksum failures included.
        checksum_failures: reads whose bytes were not the converted ones.
        read_seconds: sum of the time inside reads, checksum included.
        queue_seconds: sum of the time between submit and the start of a read.
        in_flight: reads submitted and not yet done.
        direct: whether reads bypass the page cache.
    """

    reads: int = 0
    bytes: int = 0
    errors: int = 0
    checksum_failures: int = 0
    read_seconds: float = 0.0
    queue_seconds: float = 0.0
    in_flight: int = 0
    direct: bool = False


@runtime_checkable
class Device(Protocol):
    """Reads records into memory. Implementations never publish, retry for ever, or touch memory after `done`."""

    name: str
    stats: DeviceStats

    def submit(self, read: RecordRead, into: memoryview, done: ReadDone) -> None:
        """Start reading `read.nbytes` bytes into `into` (writable, page-aligned, exactly that long) and return at once.

        The record's checksum is verified off the broker's thread before `done(None)` is called. Every failure, a short
        read and a vanished file included, arrives as a `DriveError` in `done`, with path, offset and length.
        """

    def close(self) -> None:
        """Wait for reads in flight, then give back threads and descriptors."""
