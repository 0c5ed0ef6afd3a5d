"""P(expert | token) for every expert of a layer: the token table, filled up with how often each is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compute_node.prediction.likely_tokens import Likely
from compute_node.prediction.native import mixed_shares, token_scores
from tierd.policy.token_table import TokenTable

__all__ = ["TokenScores"]

_NO_EXPERTS: Final = np.zeros(0, np.int32)
_NO_SHARES: Final = np.zeros(0, np.float32)
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
        return self._scored(place, self._table.now.at(token, place))

    def next_step(self, token: int, likely: Likely | None, place: int) -> NDArray[np.float32]:
        """float32 [experts]: how probably the step behind this one will choose each expert of a layer.

        Args:
            token: that this step computes on; what followed it so far stands for tokens that are not `likely`.
            likely: tokens that may come next; None: nothing is known of them.
            place: of the layer.
        """
        followed: NDArray[np.float32] = np.exp(self._scored(place, self._table.after.at(token, place)))
        if likely is None:
            return followed
        experts, counts, seen = self._table.now.layer(place)
        mixed = followed * np.float32(max(0.0, 1 - float(likely.shares.sum())))
        mixed_shares(
            likely.shares, likely.rows, experts, counts, seen, self._counts[place], self._seen[place],
            self._table.starts[place], self._top_k, mixed,
        )  # fmt: skip
        return mixed

    def _scored(self, place: int, counted: tuple[NDArray[np.int32], NDArray[np.float32]] | None) -> NDArray[np.float32]:
        experts, shares = (_NO_EXPERTS, _NO_SHARES) if counted is None else counted
        scores = np.empty(len(self._counts[place]), np.float32)
        start = self._table.starts[place]
        token_scores(self._counts[place], self._seen[place], experts, shares, start, self._top_k, scores)
        return scores

    def learn(self, place: int, chosen: NDArray[np.int32]) -> None:
        """The layer's router chose these experts."""
        self._counts[place][chosen] += 1.0
        self._seen[place] += 1.0
        if self._seen[place] > _MOST_COUNTED:
            self._counts[place] /= 2
            self._seen[place] /= 2
