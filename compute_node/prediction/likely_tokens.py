"""Which tokens will probably be sampled? Asked before the step is complete, among tokens that were seen often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compute_node.kernels import Segment
from compute_node.models.candidate_head import CandidateHead
from compute_node.prediction.native import likeliest_of, sharpened
from tierd.policy.token_table import ChoiceTable

__all__ = ["Likely", "LikelyTokens"]

F32 = NDArray[np.float32]

_FIRST_INTERVAL: Final = 16
_LONGEST_INTERVAL: Final = 256
_TOLD: Final = 32
"""Likeliest tokens whose experts are looked up."""
_RATE: Final = 0.05
_SMOOTHING: Final = 1 / 64
_LEAST_SHARPNESS: Final = 0.25
_MOST_SHARPNESS: Final = 16.0


class Likely(NamedTuple):
    """Tokens that may come next.

    Attributes:
        rows: int64 [n], where a table has them, see `ChoiceTable.rows_of`.
        shares: float32 [n], how likely each of them is: together 1 at most.
    """

    rows: NDArray[np.int64]
    shares: F32


class LikelyTokens:
    """Softmax of the candidates' logits, as sharp as tokens so far were chosen: greedily, or by chance.

    Candidates are the tokens that a table has counted most often, and while it knows few the first ones of the
    vocabulary, which a tokenizer usually learned first. They are chosen anew after ever longer intervals, 16 questions
    at first and 256 at last. A token that is none of them is not foreseen; how often that happens is.

    Args:
        head: logits of candidates on the state of a look-ahead.
        run: runs its segment.
        table: counts tokens; others fill it.

    Attributes:
        sharpness: what logits are multiplied with; 1 where tokens are drawn as the model says, more where the likelier
            ones are preferred.
        missed: share of tokens, of late, that were no candidates.
    """

    def __init__(self, head: CandidateHead, run: Callable[[Segment], object], table: ChoiceTable) -> None:
        self._head, self._run, self._table = head, run, table
        self._asked, self._choose_at, self._interval = 0, 1, _FIRST_INTERVAL
        self._logits: F32 = np.zeros((0, 0), np.float32)
        self._tokens = head.tokens
        self.sharpness = 1.0
        self.missed = 0.5

    @staticmethod
    def rehearse() -> None:
        """Compiles what is compiled at its first use."""
        logits = np.zeros(2, np.float32)
        likeliest_of(logits, 1.0, np.empty(1, np.int64), np.empty(1, np.float32))
        sharpened(logits, 0, 1.0, _RATE)

    def ask(self, rows: int) -> list[Likely]:
        """What may come after each of the look-ahead's rows; nothing while there are no candidates."""
        self._asked += 1
        self._tokens = self._head.tokens
        if not len(self._tokens):
            return []
        self._run(self._head.segment)
        self._logits = self._head.logits[:rows].copy()
        return [self._likeliest(row) for row in self._logits]

    def learn(self, tokens: Sequence[int]) -> None:
        """These are the tokens that came after the rows of the last question."""
        if len(tokens) != len(self._logits):
            return
        for token, logits in zip(tokens, self._logits, strict=True):
            place = int(np.searchsorted(self._tokens, token))
            known = place < len(self._tokens) and self._tokens[place] == token
            self.missed += _SMOOTHING * ((not known) - self.missed)
            if known:
                moved = sharpened(logits, place, self.sharpness, _RATE)
                self.sharpness = min(max(moved, _LEAST_SHARPNESS), _MOST_SHARPNESS)
        self._logits = self._logits[:0]

    def refresh(self) -> None:
        """Chooses candidates anew if it is time for that; takes a few milliseconds then."""
        if self._asked < self._choose_at:
            return
        self._choose_at = self._asked + self._interval
        self._interval = min(2 * self._interval, _LONGEST_INTERVAL)
        seen, most = self._table.most_seen(self._head.most), self._head.most
        others = np.setdiff1d(np.arange(most), seen, assume_unique=True)
        tokens = np.sort(np.concatenate([seen, others[: most - len(seen)]]))
        if not np.array_equal(tokens, self._head.tokens):
            self._head.choose(tokens)

    def _likeliest(self, logits: F32) -> Likely:
        places, shares = np.empty(_TOLD, np.int64), np.empty(_TOLD, np.float32)
        count = likeliest_of(logits, self.sharpness, places, shares)
        known = np.float32(1 - self.missed)
        return Likely(self._table.rows_of(self._tokens[places[:count]].tolist()), shares[:count] * known)
