"""Figures of alternating slices: pairs, their ratios, the median and the spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Paired", "alternate"]


@dataclass(frozen=True, slots=True)
class Paired:
    """Two sides measured in turn.

    Attributes:
        ours: bytes per second of each slice.
        theirs: the same of the slice beside it.
    """

    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Ours over theirs, pair by pair."""
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def median(self) -> float:
        """The middle ratio."""
        return statistics.median(self.ratios)

    def to_table(self, ours: str, theirs: str) -> dict[str, Any]:
        """Everything for machines, the raw figures of both sides included.

        Args:
            ours: name of the first side.
            theirs: name of the second side.
        """
        ratios = sorted(self.ratios)
        return {
            "median": self.median,
            "lowest": ratios[0],
            "lower_quartile": ratios[len(ratios) // 4],
            "upper_quartile": ratios[-1 - len(ratios) // 4],
            "highest": ratios[-1],
            f"{ours}_bytes_per_second": list(self.ours),
            f"{theirs}_bytes_per_second": list(self.theirs),
        }


def alternate(ours: Callable[[], float], theirs: Callable[[], float], pairs: int) -> Paired:
    """Measures both sides in turn, each first in every other pair: a drift of the machine touches both alike."""
    left: list[float] = []
    right: list[float] = []
    order: Sequence[tuple[list[float], Callable[[], float]]] = ((left, ours), (right, theirs))
    for pair in range(pairs):
        for results, measure in order if pair % 2 == 0 else reversed(order):
            results.append(measure())
    return Paired(tuple(left), tuple(right))
