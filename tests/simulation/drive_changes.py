"""An operator who takes mirrors away while the daemon runs, and brings them back."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from simulation.clock import TICK
from simulation.drive import VirtualDrive

from tierd.devices.drive import Drive
from tierd.devices.replicas import ReplicaSet
from tierd.errors import UsageError

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["DriveChanges"]


class DriveChanges:
    """Removes a random drive, waits until its reads have returned, and adds it again.

    Attributes:
        removed: how often a drive left.
        refused: how often none could, since it alone holds a shard.
    """

    def __init__(self, world: World, replicas: ReplicaSet, changes: int, rng: Random) -> None:
        self.removed = 0
        self.refused = 0
        self._world = world
        self._replicas = replicas
        self._left = changes
        self._rng = rng

    @property
    def finished(self) -> bool:
        """Whether it has changed as much as it was told to."""
        return self._left == 0

    def start(self) -> None:
        """Change something soon."""
        self._later(self._remove)

    def _later(self, call: Callable[[], object]) -> None:
        self._world.clock.call_later(self._rng.randint(1, 24) * TICK, call)

    def _remove(self) -> None:
        self._left -= 1
        device = self._rng.choice(self._world.drives)
        try:
            drive = self._replicas.leave(device.name)
        except UsageError:
            self.refused += 1
            self._world.log("stays", device.name)
            if self._left:
                self._later(self._remove)
            return
        self.removed += 1
        device.steady = False
        self._world.log("leaves", device.name)
        self._left += 1
        self._forget(device, drive, submitted=device.submitted)

    def _forget(self, device: VirtualDrive, drive: Drive, *, submitted: int) -> None:
        """Once nothing is in flight the drive is gone, and comes back later. It gets no new reads meanwhile."""
        assert device.submitted <= submitted, f"drive {device.name} got a read after it was told to leave"
        if device.outstanding:
            self._later(lambda: self._forget(device, drive, submitted=device.submitted))
            return
        self._replicas.forget(drive)
        self._world.log("left", device.name)
        self._later(lambda: self._add(device, drive))

    def _add(self, device: VirtualDrive, drive: Drive) -> None:
        self._world.log("joins", device.name)
        self._replicas.add(Drive(device, drive.shards))
        self._left -= 1
        if self._left:
            self._later(self._remove)
