"""One drive as the replica set sees it: a device, what it holds, how fast and how well it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

import xxhash

from tierd.devices.device import Device, RecordRead
from tierd.devices.health import DriveHealth
from tierd.devices.speed import DEFAULT_BANDWIDTH, DriveSpeed

__all__ = ["Drive"]

_MAX_BAD_RECORDS: Final = 1024
_FIRST_GAP: Final = 0.05
_MAX_GAP: Final = 10.0


class Drive:
    """A member of a `tierd.devices.replicas.ReplicaSet`.

    Args:
        device: reads its files.
        shards: numbers of the shards that it holds.
        bandwidth: bytes per second, as measured.
        weight: how much of that to count on.
        remeasure: whether to read from it now and then when it is never the best choice.

    Attributes:
        device: as given.
        name: of the device.
        shards: as given.
        key: 64-bit number that follows from the name, for the spread of records.
        speed: what it delivers now.
        health: whether it is to be trusted.
        leaving: no new reads go to it.
        hanging: reads that it did not answer in time and that have not returned yet.
        probing: a probe is under way; there is never more than one.
        probe_read: what a probe should read; None before the first read.
    """

    def __init__(
        self,
        device: Device,
        shards: Collection[int],
        *,
        bandwidth: float = DEFAULT_BANDWIDTH,
        weight: float = 1.0,
        remeasure: bool = True,
    ) -> None:
        self.device = device
        self.name = device.name
        self.shards = frozenset(shards)
        self.key = xxhash.xxh3_64_intdigest(self.name.encode())
        self.speed = DriveSpeed(bandwidth, weight)
        self.health = DriveHealth()
        self.leaving = False
        self.hanging = 0
        self.probing = False
        self.probe_read: RecordRead | None = None
        self._remeasure = remeasure
        self._gap = _FIRST_GAP
        self._bad: OrderedDict[int, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Drive {self.name}: {len(self.shards)} shards, {self.health!r}, {self.speed.bandwidth / 1e9:.2f} GB/s>"

    def holds(self, read: RecordRead) -> bool:
        """Whether reads of this record may go to this drive."""
        return read.shard in self.shards and not self.leaving

    def due_for_measuring(self, now: float) -> bool:
        """Whether it was passed over for so long that it may have become better; asks ever less often."""
        if not self._remeasure or not self.health.usable or self.speed.idle_for(now) < self._gap:
            return False
        self._gap = min(2 * self._gap, _MAX_GAP)
        return True

    def look_soon(self) -> None:
        """It is being used, or was found better than was thought: do not wait long before measuring it again."""
        self._gap = _FIRST_GAP

    def is_bad(self, read: RecordRead) -> bool:
        """Whether this drive gave wrong bytes for the record."""
        return read.expert in self._bad

    def mark_bad(self, read: RecordRead) -> None:
        """It gave wrong bytes for the record; the oldest of such marks are forgotten."""
        self._bad[read.expert] = None
        self._bad.move_to_end(read.expert)
        if len(self._bad) > _MAX_BAD_RECORDS:
            self._bad.popitem(last=False)

    def mark_good(self, read: RecordRead) -> None:
        """It gave the right bytes for the record."""
        self._bad.pop(read.expert, None)
