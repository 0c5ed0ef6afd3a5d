"""How far a session's hints are to be believed: what it claimed of experts against what its router then chose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

__all__ = ["HintTrust"]

_BINS: Final = 10
_PRIOR: Final = 4.0
"""Experts of each bin that count as rightly named before any was."""
_MOST: Final = 1024.0
_MOST_OPEN: Final = 64
"""Hints of a session whose layers are still to come; older ones are forgotten."""


class HintTrust:
    """What came true of one session's hints, whether they were followed or not.

    A node may be wrong about itself, by a fault or because its text has changed. Then its own throttle takes a while to
    see that hints do not pay; here a few layers tell, and they go on telling when hints have become better.
    """

    def __init__(self) -> None:
        self._claimed = [_PRIOR] * _BINS
        self._right = [_PRIOR] * _BINS
        self._open: dict[tuple[int, int], tuple[Sequence[int], Sequence[float]]] = {}

    def hint(self, step: int, layer: int, flats: Sequence[int], claimed: Sequence[float]) -> list[float]:
        """The session claims probabilities, 0 to 1, of experts by flat number; returns what they are worth: no more."""
        self._open.pop((step, layer), None)
        self._open[step, layer] = (flats, claimed)
        while len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]
        worth = []
        for claim in claimed:
            place = _bin(claim)
            right, of = self._right[place], self._claimed[place]
            worth.append(claim * (right / of) if right < of else claim)
        return worth

    def reached(self, step: int, layer: int, chosen: Collection[int]) -> None:
        """The session's router chose these experts of a layer, by flat number."""
        said = self._open.pop((step, layer), None)
        if said is None:
            return
        for flat, claim in zip(*said, strict=True):
            place = _bin(claim)
            self._claimed[place] += claim
            self._right[place] += flat in chosen
        if max(self._claimed) > _MOST:
            self._claimed = [claimed / 2 for claimed in self._claimed]
            self._right = [right / 2 for right in self._right]


def _bin(claim: float) -> int:
    return min(int(claim * _BINS), _BINS - 1)
