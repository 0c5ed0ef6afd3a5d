"""Reads that nobody waits for.

They take free slots only, begin only while the drives have nothing else to do, and make way when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping

from tierd.broker.records import Reading

__all__ = ["BackgroundReads"]

_MOST_FAILURES = 8


class BackgroundReads:
    """The experts still to be read, in order, and the rules by which they are.

    Attributes:
        landed: reads that ended well.
        failed: reads that did not; after some in a row the rest is given up, since a drive in trouble has enough to do.
        full: it ended because no slot was free.
    """

    def __init__(self) -> None:
        self.landed = 0
        self.failed = 0
        self.full = False
        self._queue: deque[int] = deque()
        self._depth = 0
        self._in_a_row = 0

    def __len__(self) -> int:
        return len(self._queue)

    def begin(self, flats: Iterable[int], depth: int) -> None:
        """Read these experts, no more than `depth` at a time; they take the place of what was still to be read."""
        self._queue = deque(flats)
        self._depth = depth
        self._in_a_row = 0
        self.full = False

    def go_on(
        self,
        reading: Mapping[int, Reading],
        known: Callable[[int], bool],
        take: Callable[[], int | None],
        start: Callable[[int, int], None],
    ) -> None:
        """Begin what may begin now.

        Args:
            reading: all reads in flight; `start` adds to it.
            known: whether an expert is in RAM or on its way.
            take: gives a free slot, if there is one.
            start: begins the read of an expert into a slot.
        """
        while self._queue and len(reading) < self._depth and not any(r.waiters for r in reading.values()):
            if known(flat := self._queue.popleft()):
                continue
            slot = take()
            if slot is None:
                self.full = True
                self._queue.clear()
            else:
                start(flat, slot)

    def make_way(
        self, reading: Mapping[int, Reading], wanted: Container[int], withdraw: Callable[[int], bool]
    ) -> list[tuple[int, int]]:
        """Take back what has not reached a drive yet, except what is wanted now.

        Args:
            reading: all reads in flight.
            wanted: flat numbers.
            withdraw: takes back the read into a slot, if that can still be done.

        Returns:
            Expert and slot of each read that was taken back; it comes later.
        """
        back = [
            (flat, read.slot)
            for flat, read in reading.items()
            if read.background and not read.waiters and flat not in wanted and withdraw(read.slot)
        ]
        self._queue.extendleft(flat for flat, _ in reversed(back))
        return back

    def ended(self, *, good: bool) -> None:
        """A read that was begun here has ended."""
        if good:
            self.landed += 1
            self._in_a_row = 0
            return
        self.failed += 1
        self._in_a_row += 1
        if self._in_a_row >= _MOST_FAILURES:
            self._queue.clear()
