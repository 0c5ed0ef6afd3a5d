"""How often was right what had such a score? Turns scores of 0 to 1 into probabilities."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Reliability"]

F32 = NDArray[np.float32]

_BINS: Final = 20
_PRIOR: Final = 8.0
"""Samples that a score counts for as its own probability."""
_MOST: Final = 4096.0


class Reliability:
    """Counts of scores and of those that came true, in bins; old counts fade."""

    def __init__(self) -> None:
        self._seen = np.full(_BINS, _PRIOR)
        self._right = _PRIOR * (np.arange(_BINS) + 0.5) / _BINS

    def probability(self, scores: F32) -> F32:
        """Probabilities for scores, float32 of the same shape."""
        bins = _bins(scores)
        result: F32 = (self._right[bins] / self._seen[bins]).astype(np.float32)
        return result

    def learn(self, scores: F32, right: NDArray[np.bool_]) -> None:
        """These scores were those of guesses that came true, or not."""
        bins = _bins(scores)
        self._seen += np.bincount(bins, minlength=_BINS)
        self._right += np.bincount(bins[right], minlength=_BINS)
        if self._seen.max() > _MOST:
            self._seen /= 2
            self._right /= 2


def _bins(scores: F32) -> NDArray[np.intp]:
    return np.minimum((scores * _BINS).astype(np.intp), _BINS - 1)
