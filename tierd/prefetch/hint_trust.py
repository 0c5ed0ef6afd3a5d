"""How far a session's hints are to be believed: what it claimed of experts against what its router then chose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
        self._claimed = np.full(_BINS, _PRIOR)
        self._right = np.full(_BINS, _PRIOR)
        self._open: dict[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.float64]]] = {}

    def hint(self, step: int, layer: int, flats: Sequence[int], claimed: Sequence[float]) -> list[float]:
        """The session claims probabilities, 0 to 1, of experts by flat number; returns what they are worth: no more."""
        claims = np.array(claimed, np.float64)
        self._open.pop((step, layer), None)
        self._open[step, layer] = (np.array(flats, np.int64), claims)
        while len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]
        worth: list[float] = (claims * np.minimum(1.0, self._right / self._claimed)[_bins(claims)]).tolist()
        return worth

    def reached(self, step: int, layer: int, chosen: Collection[int]) -> None:
        """The session's router chose these experts of a layer, by flat number."""
        said = self._open.pop((step, layer), None)
        if said is None:
            return
        flats, claims = said
        bins = _bins(claims)
        right = np.isin(flats, np.fromiter(chosen, np.int64, len(chosen)))
        self._claimed += np.bincount(bins, claims, _BINS)
        self._right += np.bincount(bins, right, _BINS)
        if self._claimed.max() > _MOST:
            self._claimed /= 2
            self._right /= 2


def _bins(claims: NDArray[np.float64]) -> NDArray[np.intp]:
    return np.minimum((claims * _BINS).astype(np.intp), _BINS - 1)
