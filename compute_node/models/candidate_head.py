"""The LM head for a few tokens only, applied to a state before its time: which of them will probably come next?

The ops stand apart from the step, as those of `look_ahead` do, and change nothing that a token depends on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compute_node import kernels
from compute_node.kernels import Batch, Matrix, Segment
from compute_node.kernels.matrix import scales_rows_shift
from compute_node.kernels.matrix_rows import take_rows

__all__ = ["CandidateHead", "HeadWeights"]

F32 = NDArray[np.float32]

_MOST_BYTES: Final = 3 << 19
"""Of the candidates' rows: they are read once a step, in one or two tenths of a millisecond."""
_MOST_TOKENS: Final = 2048
_LEAST_TOKENS: Final = 64
"""Fewer tell too little: rows are wide then, and nothing is looked at."""


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """What makes logits of a state.

    Attributes:
        norm: weight of the final norm, float32 [H].
        head: [vocabulary, H].
    """

    norm: F32
    head: Matrix


class CandidateHead:
    """Logits of chosen tokens; their rows of the head are copied, into 1.5 MiB at most.

    Args:
        weights: of the whole head.
        eps: of the norm.
        state: float32 [rows, H], what the head is applied to.
        batch: live rows of the state.

    Attributes:
        most: tokens that can be chosen; 0 where rows are too wide, or cannot be copied one by one.
        tokens: int64 [candidates], those that were chosen.
        logits: float32 [rows, candidates], what `segment` gives.
        segment: norm and head; without ops until tokens are chosen.
    """

    def __init__(self, weights: HeadWeights, eps: float, state: F32, batch: Batch) -> None:
        self._weights, self._eps = weights, eps
        self._state, self._batch = state, batch
        self._normed = np.zeros_like(state)
        head = weights.head
        fitting = min(_MOST_BYTES * head.rows // head.nbytes, _MOST_TOKENS, head.rows)
        # Where rows share their scales, taking some of them would widen the whole head first.
        single = scales_rows_shift(head.format) == 0
        self.most = fitting if single and fitting >= min(_LEAST_TOKENS, head.rows) else 0
        self.tokens = np.zeros(0, np.int64)
        self.logits = np.zeros((len(state), 0), np.float32)
        self.segment = Segment("candidates", [])

    def choose(self, tokens: NDArray[np.int64]) -> None:
        """Sets the candidates: int64, at least one and at most `most` ids of the vocabulary."""
        rows, batch = take_rows(self._weights.head, tokens), self._batch
        self.tokens, self.logits = tokens, np.zeros((len(self._state), len(tokens)), np.float32)
        norm = self._weights.norm
        self.segment = Segment(
            "candidates for the next token",
            [
                kernels.rms_norm("candidates' norm", self._state, norm, self._eps, self._normed, batch),
                kernels.matmul("candidates' head", rows, self._normed, self.logits, batch),
            ],
        )
