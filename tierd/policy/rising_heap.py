"""Experts ordered by keep-values that nearly always rise, and are worked out only when somebody must leave."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

__all__ = ["RisingHeap"]

_SLACK: Final = 64
_MOST_BEHIND: Final = 512
"""Experts whose entries may be behind their values. One `lowest` may have to catch up with all of them."""
_FLOOR: Final = 0


class RisingHeap:
    """A binary heap whose entries may lie below the present values: an expert is valued when it has come to the top.

    A use raises a value, and most of those that are used stay far from the top. So `rose` only notes that the value is
    another one. `lowest` works values out until one is at the top that is up to date; all others are above theirs.
    Entries that left the heap's order, by `fell` and `drop`, stay until they reach the top, or until they are more than
    the live ones; then the heap is built anew. Equal values leave in the order in which they were set last.

    Args:
        value: the present keep-value of an expert. It may fall only where `fell` says so.

    Attributes:
        moves: entries pushed and popped so far, the measure of work.
    """

    def __init__(self, value: Callable[[int], float]) -> None:
        self.moves = 0
        self._value = value
        self._heap: list[tuple[float, int, int]] = []
        self._live: dict[int, tuple[float, int, int]] = {}  # each expert's entry: at most its value, number, expert
        self._numbers = array("q")  # by expert: which change of a value was its last one
        self._number = _FLOOR
        self._behind: dict[int, None] = {}  # experts whose entries are not of their last change, the longest first

    def __len__(self) -> int:
        return len(self._live)

    def enter(self, expert: int, floor: float) -> None:
        """`expert` is one of those that may leave from now on; its value is at least `floor`."""
        if expert >= len(self._numbers):
            self._numbers.extend([_FLOOR] * (expert + 1 - len(self._numbers) + len(self._numbers) // 2))
        self._push(floor, _FLOOR, expert)
        self.rose(expert)

    def rose(self, expert: int) -> None:
        """The value of `expert` was set anew, and is not lower than it was."""
        self._number += 1
        self._numbers[expert] = self._number
        behind = self._behind
        if expert not in behind:
            behind[expert] = None
            if len(behind) > _MOST_BEHIND:
                self._catch_up(next(iter(behind)))

    def fell(self, expert: int, floor: float) -> None:
        """The value of `expert` was set anew, and may be as low as `floor`."""
        if self._live[expert][0] <= floor:
            self.rose(expert)
        else:
            self._number += 1
            self._numbers[expert] = self._number
            self._behind.pop(expert, None)
            self._push(self._value(expert), self._number, expert)

    def drop(self, expert: int) -> None:
        """`expert` is not asked about any more; KeyError if it is not there."""
        del self._live[expert]
        self._behind.pop(expert, None)

    def lowest(self, evictable: Callable[[int], bool]) -> int | None:
        """The expert of the lowest keep-value among those that `evictable` accepts; it stays."""
        heap, live, behind = self._heap, self._live, self._behind
        skipped: list[tuple[float, int, int]] = []
        found: int | None = None
        while heap:
            entry = heap[0]
            expert = entry[2]
            if live.get(expert) is not entry:
                heappop(heap)
                self.moves += 1
            elif expert in behind:
                live[expert] = fresh = (self._value(expert), self._numbers[expert], expert)
                del behind[expert]
                heapreplace(heap, fresh)
                self.moves += 1
            elif evictable(expert):
                found = expert
                break
            else:
                skipped.append(heappop(heap))
                self.moves += 1
        for entry in skipped:
            heappush(heap, entry)
            self.moves += 1
        return found

    def _catch_up(self, expert: int) -> None:
        del self._behind[expert]
        self._push(self._value(expert), self._numbers[expert], expert)

    def _push(self, value: float, number: int, expert: int) -> None:
        self._live[expert] = entry = (value, number, expert)
        heappush(self._heap, entry)
        self.moves += 1
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            live = self._live
            self._heap = [entry for entry in self._heap if live.get(entry[2]) is entry]
            heapify(self._heap)
            self.moves += len(self._heap)
