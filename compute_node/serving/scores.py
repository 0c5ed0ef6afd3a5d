"""Log-probabilities of tokens, as the API gives them: of the model's own distribution, before any penalty."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Scored", "scored"]

Scored = tuple[float, tuple[tuple[int, float], ...]]
"""The log-probability of a token, and the likeliest tokens with theirs."""


def scored(logits: NDArray[np.float32], token: int, count: int) -> Scored:
    """Log-probability of a token, and the `count` likeliest ones; among equals the lower id comes first.

    Args:
        logits: float32 [vocabulary].
        token: whose log-probability is wanted.
        count: how many alternatives.
    """
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    top: tuple[tuple[int, float], ...] = ()
    if count:
        kept = min(count, len(wide))
        likely = np.flatnonzero(wide >= np.partition(wide, -kept)[-kept])
        likely = likely[np.argsort(-wide[likely], kind="stable")][:kept]
        top = tuple(zip(likely.tolist(), wide[likely].tolist(), strict=True))
    return float(wide[token]), top
