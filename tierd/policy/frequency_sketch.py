"""A count-min sketch with ageing: how often was an expert used lately, in a fixed number of bytes."""

from __future__ import annotations

from typing import Final

__all__ = ["FrequencySketch"]

_ROWS: Final = 4
_MOST: Final = 15
_MULTIPLIERS: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)  # odd: multiplication permutes 32 bits


class FrequencySketch:
    """Counts up to 15 in four rows; an estimate is never below the true count since the last halving.

    The aging of TinyLFU (Einziger, Friedman and Manes, arXiv 1512.00727): after `period` additions all counts are
    halved, which costs a constant amount per addition.

    Args:
        width: counters per row, rounded up to a power of two.
        period: additions between halvings.
    """

    def __init__(self, width: int, period: int) -> None:
        bits = max(4, (width - 1).bit_length())
        self._shift = 32 - bits
        self._rows = [bytearray(1 << bits) for _ in range(_ROWS)]
        self._period = period
        self._added = 0

    def add(self, expert: int) -> None:
        """One more use."""
        for row, place in zip(self._rows, self._places(expert), strict=True):
            if row[place] < _MOST:
                row[place] += 1
        self._added += 1
        if self._added >= self._period:
            self._added //= 2
            self._rows = [bytearray(count >> 1 for count in row) for row in self._rows]

    def estimate(self, expert: int) -> int:
        """Uses of the expert, 0 to 15; too high where others share all its counters."""
        return min(row[place] for row, place in zip(self._rows, self._places(expert), strict=True))

    def _places(self, expert: int) -> list[int]:
        return [((expert + 1) * factor & 0xFFFFFFFF) >> self._shift for factor in _MULTIPLIERS]
