"""An operator who makes the arena smaller and larger while nodes use it, and fills it in the background."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from simulation.clock import TICK

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["SizeChanges"]


class SizeChanges:
    """Sets a random size, between what a node was told that fits and what the arena was made for, again and again.

    Attributes:
        smaller: how often it shrank.
        settled: how often nothing was left in the lost slots when the next change came.
    """

    def __init__(self, world: World, changes: int, least: int, rng: Random) -> None:
        self.smaller = 0
        self.settled = 0
        self._world = world
        self._left = changes
        self._least = least
        self._rng = rng

    @property
    def finished(self) -> bool:
        """Whether it has changed as much as it was told to."""
        return self._left == 0

    def start(self) -> None:
        """Fill the arena, and change it soon."""
        self._warm()
        self._later(self._change)

    def _later(self, call: Callable[[], object]) -> None:
        self._world.clock.call_later(self._rng.randint(1, 48) * TICK, call)

    def _warm(self) -> None:
        flats = list(range(len(self._world.store)))
        self._rng.shuffle(flats)
        self._world.broker.warm(flats, self._rng.randint(1, 4))

    def _change(self) -> None:
        arena = self._world.arena
        self.settled += self._world.broker.settled
        slots = self._rng.randint(self._least, arena.most_slots)
        self._world.log("size", slots)
        self.smaller += slots < arena.slots
        arena.resize(slots)
        ended = self._world.broker.resized(self._world.broker.max_experts_per_acquire)
        assert not ended, f"sessions {ended} were told more than {self._least}"
        if self._rng.random() < 0.5:
            self._warm()
        self._left -= 1
        if self._left:
            self._later(self._change)
