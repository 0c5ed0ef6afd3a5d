"""log P(expert | token) for every expert of a layer: the token table, filled up with how often each is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierd.policy.token_table import TokenTable

__all__ = ["TokenScores"]

_LEAST: Final = 1e-3
_MOST_COUNTED: Final = 1 << 16


class TokenScores:
    """Scores from a token table that others fill.

    Args:
        table: counts by token.
        experts_per_layer: of the layers with routed experts, in rising order.
        top_k: that a router chooses.
    """

    def __init__(self, table: TokenTable, experts_per_layer: Sequence[int], top_k: int) -> None:
        self._table = table
        self._top_k = top_k
        self._counts = [np.full(experts, top_k / experts, np.float64) for experts in experts_per_layer]
        self._seen = [1.0] * len(self._counts)

    def of(self, token: int, place: int) -> NDArray[np.float32]:
        """float32 [experts]: scores for a layer, by its place among those with routed experts."""
        probabilities = self._counts[place] / self._seen[place]
        found = self._table.now.probabilities(token)
        if found is not None:
            experts, known = found[0][place], found[1][place]
            there = experts >= 0
            # What the table does not say of the token's choices is spread as the layer's choices are.
            left = max(0.0, 1.0 - float(known[there].sum()) / self._top_k)
            probabilities = probabilities * left
            probabilities[experts[there] - self._table.starts[place]] += known[there]
        scores: NDArray[np.float32] = np.log(np.clip(probabilities, _LEAST, 1.0)).astype(np.float32)
        return scores

    def learn(self, place: int, chosen: NDArray[np.int32]) -> None:
        """The layer's router chose these experts."""
        self._counts[place][chosen] += 1.0
        self._seen[place] += 1.0
        if self._seen[place] > _MOST_COUNTED:
            self._counts[place] /= 2
            self._seen[place] /= 2
