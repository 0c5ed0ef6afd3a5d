"""From a score to a probability: how often were experts chosen whose score lay so far from the border?"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Calibration", "margins"]

_BINS: Final = 24
_REACH: Final = 2.0
_PRIOR: Final = 4.0
_MOST: Final = 4096.0


def margins(scores: NDArray[np.float32], top_k: int) -> NDArray[np.float32]:
    """How far each score lies above the border between the k-th and the next one, in standard deviations of all."""
    if top_k >= len(scores):
        return np.ones_like(scores)
    ordered = np.partition(scores, (len(scores) - top_k - 1, len(scores) - top_k))
    border = (ordered[len(scores) - top_k - 1] + ordered[len(scores) - top_k]) / 2
    result: NDArray[np.float32] = (scores - border) / max(float(scores.std()), 1e-6)
    return result


class Calibration:
    """Counts of margins and of those that were chosen, in bins, beginning from a plausible curve; old counts fade."""

    def __init__(self) -> None:
        middles = (np.arange(_BINS) + 0.5) / _BINS * 2 * _REACH - _REACH
        self._seen = np.full(_BINS, _PRIOR)
        self._chosen = _PRIOR / (1 + np.exp(-4 * middles))

    def probability(self, margin: NDArray[np.float32]) -> NDArray[np.float32]:
        """Probabilities for margins, float32 of the same shape."""
        bins = _bins(margin)
        result: NDArray[np.float32] = (self._chosen[bins] / self._seen[bins]).astype(np.float32)
        return result

    def learn(self, margin: NDArray[np.float32], chosen: NDArray[np.bool_]) -> None:
        """These margins were those of experts that were chosen, or not."""
        bins = _bins(margin)
        self._seen += np.bincount(bins, minlength=_BINS)
        self._chosen += np.bincount(bins[chosen], minlength=_BINS)
        if self._seen.max() > _MOST:
            self._seen /= 2
            self._chosen /= 2


def _bins(margin: NDArray[np.float32]) -> NDArray[np.intp]:
    scaled = (np.clip(margin, -_REACH, _REACH) + _REACH) / (2 * _REACH) * _BINS
    return np.minimum(scaled.astype(np.intp), _BINS - 1)
