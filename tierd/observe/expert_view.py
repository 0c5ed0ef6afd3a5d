"""Every expert at a glance, for the page: where it is, how hot its routing is, and what was used since the last look.

Nothing here runs unless somebody looks. A look compares arrays; it costs some microseconds per ten thousand experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["ExpertSources", "ExpertView", "Place"]

HEAT_HALF_LIFE: Final = 20.0
"""Seconds in which the heat of an expert that is not used any more halves."""

_FIRST_PEAK: Final = 20.0
"""Uses that the hottest expert is credited with at first, by the history or by what was asked for until now."""


class Place(IntEnum):
    """The fastest tier that has an expert, or that it is on its way from a drive to RAM."""

    NOWHERE = 0
    ONE_DRIVE = 1
    DRIVES = 2
    RAM = 3
    READING = 4


@dataclass(frozen=True, slots=True)
class ExpertSources:
    """Where a view looks; every array has one entry per expert, by flat number.

    Attributes:
        present: bool, whether the expert is in RAM.
        copies: uint8, how many usable drives have it.
        reading: flat numbers of those that are being read just now.
        asked: uint32, uses asked for by message, rising modulo 2**32.
        unasked: the same for uses without a message, by session.
        rates: float64, what earlier runs used; all zero where nothing is known.
    """

    present: Callable[[], NDArray[np.bool_]]
    copies: Callable[[], NDArray[np.uint8]]
    reading: Callable[[], Collection[int]]
    asked: Callable[[], NDArray[np.uint32]]
    unasked: Callable[[], Mapping[int, NDArray[np.uint32]]]
    rates: Callable[[], NDArray[np.float64]]


class ExpertView:
    """Remembers what was seen last, and tells what changed.

    Args:
        sources: where to look.

    Attributes:
        places: uint8[experts], `Place` of each as of the last look.
        used: uint32[experts], uses between the last two looks.
    """

    def __init__(self, sources: ExpertSources) -> None:
        self._sources = sources
        self._asked = sources.asked().copy()
        self._unasked = dict(sources.unasked())
        rates = sources.rates()
        peak = float(rates.max(initial=0.0))
        if peak <= 0:
            rates = self._asked.astype(np.float64)
            peak = max(1.0, float(rates.max(initial=0.0)))
        self._heat: NDArray[np.float64] = rates * (_FIRST_PEAK / peak)
        self.places = self._look()
        self.used: NDArray[np.uint32] = np.zeros(rates.size, dtype=np.uint32)

    def look(self, seconds: float) -> NDArray[np.intp]:
        """Look again, `seconds` after the last time; returns the flat numbers of experts whose place changed."""
        before, self.places = self.places, self._look()
        now = self._sources.asked().copy()
        used = now - self._asked
        self._asked = now
        unasked = dict(self._sources.unasked())
        for session, uses in unasked.items():
            last = self._unasked.get(session)
            used = used + (uses if last is None else uses - last)
        self._unasked = unasked
        self.used = used
        self._heat *= 2.0 ** (-seconds / HEAT_HALF_LIFE)
        self._heat += used
        return np.flatnonzero(self.places != before)

    def heat(self) -> NDArray[np.uint8]:
        """Routing heat of each expert, uint8[experts]: the square root of its decayed uses, 255 for the hottest."""
        peak = max(float(self._heat.max(initial=0.0)), 1e-9)
        heat: NDArray[np.uint8] = np.rint(np.sqrt(self._heat / peak) * 255).astype(np.uint8)
        return heat

    def _look(self) -> NDArray[np.uint8]:
        places = np.minimum(self._sources.copies(), Place.DRIVES).astype(np.uint8)
        places[list(self._sources.reading())] = Place.READING
        places[self._sources.present()] = Place.RAM
        return places
