"""Experts ordered by keep-value, where values change far more often than someone must leave."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final

__all__ = ["KeepHeap"]

_SLACK: Final = 64


class KeepHeap:
    """A binary heap with lazy deletion: `put` and `drop` cost O(log n), `lowest` the same plus what it must skip.

    Entries that a later `put` or `drop` made stale stay until they reach the top, or until they are more than the
    live ones; then the heap is built anew, which the calls that left them have paid for. Equal values leave in the
    order in which they were put.

    Attributes:
        moves: entries pushed and popped so far, the measure of work.
    """

    def __init__(self) -> None:
        self.moves = 0
        self._heap: list[tuple[float, int, int]] = []
        self._order: dict[int, int] = {}  # expert -> number of its live entry
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, expert: int) -> bool:
        return expert in self._order

    def put(self, expert: int, value: float) -> None:
        """`expert` has this keep-value from now on."""
        self._numbers += 1
        self._order[expert] = self._numbers
        self._push((value, self._numbers, expert))
        if len(self._heap) > 2 * len(self._order) + _SLACK:
            self._heap = [entry for entry in self._heap if self._order.get(entry[2]) == entry[1]]
            heapify(self._heap)
            self.moves += len(self._heap)

    def drop(self, expert: int) -> None:
        """`expert` is not asked about any more; KeyError if it is not there."""
        del self._order[expert]

    def lowest(self, evictable: Callable[[int], bool]) -> int | None:
        """The expert of the lowest keep-value among those that `evictable` accepts; it stays."""
        skipped: list[tuple[float, int, int]] = []
        found: int | None = None
        while self._heap:
            entry = self._heap[0]
            if self._order.get(entry[2]) != entry[1]:
                heappop(self._heap)
                self.moves += 1
            elif evictable(entry[2]):
                found = entry[2]
                break
            else:
                skipped.append(heappop(self._heap))
                self.moves += 1
        for entry in skipped:
            self._push(entry)
        return found

    def _push(self, entry: tuple[float, int, int]) -> None:
        heappush(self._heap, entry)
        self.moves += 1
