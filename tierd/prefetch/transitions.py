"""Which experts of a layer follow those of the layer before it? Counted while sessions run; old counts fade."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Transitions"]

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

_PLACES: Final = 16
"""Followers remembered per expert."""
_KEPT: Final = 0.98
"""Of a count, each time its expert is counted again: half is left after 34 of these."""


class Transitions:
    """Decayed counts of the followers of each expert, the most frequent ones.

    A follower without a place takes the one with the smallest count, and goes on counting from there, as in
    `tierd.policy.token_table`. A place takes 8 bytes.

    Args:
        experts: of the store.
    """

    def __init__(self, experts: int) -> None:
        self._followers = np.full((experts, _PLACES), -1, np.int32)
        self._counts = np.zeros((experts, _PLACES), np.float32)
        self._seen = np.zeros(experts, np.float32)

    @property
    def nbytes(self) -> int:
        """Memory of the counts."""
        return self._followers.nbytes + self._counts.nbytes + self._seen.nbytes

    def count(self, before: I32, after: I32) -> None:
        """A router chose `after` behind one that chose `before`: flat numbers, distinct in each."""
        followers, counts = self._followers[before], self._counts[before] * np.float32(_KEPT)
        same = followers[:, :, None] == after
        counts += same.any(2)
        for row, lacking in enumerate(~same.any(1)):
            new = after[lacking][:_PLACES]
            if new.size:
                weakest = np.argpartition(counts[row], new.size - 1)[: new.size]
                followers[row, weakest] = new
                counts[row, weakest] += 1
        self._followers[before], self._counts[before] = followers, counts
        self._seen[before] = self._seen[before] * np.float32(_KEPT) + 1

    def scores(self, before: I32, first: int, experts: int) -> F32:
        """How often each expert of a layer follows those, on average over them: float32 [experts], 0 to 1.

        Args:
            before: flat numbers of the layer before it, at least one.
            first: flat number of the layer's expert 0.
            experts: of the layer.
        """
        followers = self._followers[before] - first
        # One more than were seen, which nobody followed: what was seen once is not yet certain.
        shares = self._counts[before] / (self._seen[before, None] + 1)
        inside = (followers >= 0) & (followers < experts)
        sums = np.bincount(followers[inside], shares[inside], minlength=experts)
        return np.minimum(sums / len(before), 1).astype(np.float32)
