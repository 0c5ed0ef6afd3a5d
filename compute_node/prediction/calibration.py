"""From a score to a probability: how often were experts chosen whose score lay so far from the border?"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node.prediction.native import BINS, REACH, count_margins, margins_of, probabilities_of
from tierd.errors import UsageError

__all__ = ["checked_counts", "count_chosen", "first_counts", "margins", "plain_counts", "probabilities"]

Counts = NDArray[np.float64]

_PRIOR: Final = 4.0


def margins(scores: NDArray[np.float32], top_k: int) -> NDArray[np.float32]:
    """How far each score lies above the border between the k-th and the next one, in standard deviations of all.

    Scores are float32 [..., experts]; so is the result.
    """
    rows = np.ascontiguousarray(scores).reshape(-1, scores.shape[-1])
    result = np.empty_like(rows)
    for row, margin in zip(rows, result, strict=True):
        margins_of(row, top_k, margin)
    return result.reshape(scores.shape)


def first_counts() -> Counts:
    """Counts to begin with, float64 [2, bins]: margins seen, and chosen ones among them by a plausible curve."""
    middles = (np.arange(BINS) + 0.5) / BINS * 2 * REACH - REACH
    return np.stack([np.full(BINS, _PRIOR), _PRIOR / (1 + np.exp(-4 * middles))])


def plain_counts() -> Counts:
    """The same where scores are probabilities, `REACH` for 1 and its negative for 0: as many chosen as was said."""
    return np.stack([np.full(BINS, _PRIOR), _PRIOR * (np.arange(BINS) + 0.5) / BINS])


def probabilities(counts: Counts, margin: NDArray[np.float32]) -> NDArray[np.float32]:
    """Probabilities for margins, float32 of the same shape."""
    result = np.empty(margin.shape, np.float32)
    probabilities_of(counts, np.ascontiguousarray(margin).reshape(-1), result.reshape(-1))
    return result


def count_chosen(
    counts: Counts, margin: NDArray[np.float32], chosen: NDArray[np.bool_], counted: NDArray[np.bool_]
) -> None:
    """These margins were those of experts that were chosen, or not; old counts fade.

    Args:
        counts: float64 [2, bins], changed.
        margin: float32 of any shape.
        chosen: bool of that shape.
        counted: bool of that shape, which of them count.
    """
    count_margins(counts, margin.reshape(-1), chosen.reshape(-1), counted.reshape(-1))


def checked_counts(counts: NDArray[Any]) -> Counts:
    """A copy of counts that a file gave; UsageError if they are impossible."""
    good = counts.shape == (2, BINS) and np.isfinite(counts).all() and (counts[0] > 0).all()
    if not good or not ((counts[1] >= 0) & (counts[1] <= counts[0])).all():
        raise UsageError("a saved predictor holds impossible counts")
    return counts.astype(np.float64)
