"""A reader without locks: it takes a word from the table, reads piece by piece, and keeps it all if the word stands."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from simulation.clock import TICK
from simulation.records import RECORD_BYTES

from tierd.arena.table import ABSENT, unpack

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["UnlockedReader"]


class UnlockedReader:
    """Reads experts that nobody granted to it, in pieces, while the arena changes underneath.

    Attributes:
        kept: reads whose word was still there at the end; their bytes were right.
        discarded: reads whose word had changed.
    """

    def __init__(self, world: World, reads: int, rng: Random) -> None:
        self.kept = 0
        self.discarded = 0
        self._world = world
        self._left = reads
        self._rng = rng

    @property
    def finished(self) -> bool:
        """Whether it has read as often as it was told to."""
        return self._left == 0

    def start(self) -> None:
        """Look at the table soon."""
        self._later(self._look)

    def _later(self, call: Callable[[], object]) -> None:
        self._world.clock.call_later(self._rng.randint(1, 6) * TICK, call)

    def _look(self) -> None:
        resident = [flat for flat, word in enumerate(self._world.table.words) if word != ABSENT]
        if resident:
            flat = self._rng.choice(resident)
            self._read(flat, self._world.table.load(flat), b"")
        else:
            self._done()

    def _read(self, flat: int, word: int, read: bytes) -> None:
        """Another piece, or the verdict."""
        if len(read) < RECORD_BYTES:
            begin = unpack(word)[1] * RECORD_BYTES + len(read)
            read += bytes(self._world.payload.data[begin : begin + RECORD_BYTES // 4])
            self._later(lambda: self._read(flat, word, read))
            return
        if self._world.table.load(flat) == word:
            assert read == self._world.store.content[flat], f"a reader kept wrong bytes of expert {flat}"
            self.kept += 1
        else:
            self.discarded += 1
        self._world.log("read", flat, word, self.kept, self.discarded)
        self._done()

    def _done(self) -> None:
        self._left -= 1
        if self._left:
            self._later(self._look)
