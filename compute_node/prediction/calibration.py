"""From a score to a probability: how often were experts chosen whose score lay so far from the border?"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError

__all__ = ["Calibration", "margins"]

_BINS: Final = 24
_REACH: Final = 2.0
_PRIOR: Final = 4.0
_MOST: Final = 4096.0


def margins(scores: NDArray[np.float32], top_k: int) -> NDArray[np.float32]:
    """How far each score lies above the border between the k-th and the next one, in standard deviations of all.

    Scores are float32 [..., experts]; so is the result.
    """
    below = scores.shape[-1] - top_k - 1
    if below < 0:
        return np.ones_like(scores)
    ordered = np.partition(scores, (below, below + 1), axis=-1)
    border = (ordered[..., below, None] + ordered[..., below + 1, None]) / 2
    spread = np.maximum(scores.std(axis=-1, keepdims=True), np.float32(1e-6))
    result: NDArray[np.float32] = (scores - border) / spread
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
        self._seen += np.bincount(bins.ravel(), minlength=_BINS)
        self._chosen += np.bincount(bins[chosen], minlength=_BINS)
        if self._seen.max() > _MOST:
            self._seen /= 2
            self._chosen /= 2

    def as_array(self) -> NDArray[np.float64]:
        """The counts, for a file: float64 [2, bins], seen and chosen."""
        return np.stack([self._seen, self._chosen])

    def restore(self, counts: NDArray[Any]) -> None:
        """Takes the content of `as_array`; UsageError if it is none."""
        good = counts.shape == (2, _BINS) and np.isfinite(counts).all() and (counts[0] > 0).all()
        if not good or not ((counts[1] >= 0) & (counts[1] <= counts[0])).all():
            raise UsageError("a saved predictor holds impossible counts")
        self._seen, self._chosen = counts.astype(np.float64)


def _bins(margin: NDArray[np.float32]) -> NDArray[np.intp]:
    scaled = (np.clip(margin, -_REACH, _REACH) + _REACH) / (2 * _REACH) * _BINS
    return np.minimum(scaled.astype(np.intp), _BINS - 1)
