"""Which experts will one layer want? Several ways to tell, and for each layer the one that has told best so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node.prediction.calibration import checked_counts, first_counts
from compute_node.prediction.correction import Correction
from compute_node.prediction.native import guess_scores, learn_scores
from tierd.errors import UsageError

__all__ = ["PREDICTORS", "Guess", "LayerGuess"]

F32 = NDArray[np.float32]

PREDICTORS: Final = ("look-ahead", "token table", "both", "corrected")
"""The layer's router on an earlier state; P(expert | token); their log scores added; a learned map of the two."""

_MOST_CORRECTED: Final = 128
"""Experts of a layer up to which the map is learned; its sums grow with the square."""
_NOTHING: Final = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Guess:
    """What was said of one layer for one token.

    Attributes:
        by_predictor: float32 [predictors, experts], scores; only those that had something to go by are valid.
        known: bool [predictors], which these are.
        best: number of the predictor that was believed.
        probabilities: of being wanted, float32 [experts], by that one.
        absent: bool [experts], not in RAM when it was said.
        inputs: of the learned map, float32 [2 experts].
    """

    by_predictor: F32
    known: NDArray[np.bool_]
    best: int
    probabilities: F32
    absent: NDArray[np.bool_]
    inputs: F32

    @property
    def scores(self) -> dict[str, F32]:
        """The valid scores, by predictor."""
        return {name: self.by_predictor[n] for n, name in enumerate(PREDICTORS) if self.known[n]}

    @property
    def chosen_by(self) -> str:
        """The predictor that was believed."""
        return PREDICTORS[self.best]


class LayerGuess:
    """Guesses for one layer from one distance, and what was learned of how good they are.

    Predictors are compared by recall on misses: the share of the wanted experts that were not in RAM among the
    `top_k` likeliest of a predictor. Probabilities are calibrated on the absent experts, since the others need no hint.

    Args:
        experts: of the layer.
        top_k: that its router chooses.
        maps: whether a map is learned where the layer is small enough; it needs a router's logits on an earlier state.
    """

    def __init__(self, experts: int, top_k: int, *, maps: bool = True) -> None:
        self._experts, self._top_k = experts, top_k
        self._recall = np.full(len(PREDICTORS), 0.5)
        self._recall[-1] = 0.51  # among equals the one that learns
        self._counts = np.stack([first_counts() for _ in PREDICTORS])
        self._correction = Correction(2 * experts, experts) if maps and experts <= _MOST_CORRECTED else None
        self._no_map = np.zeros((0, experts), np.float32)

    @property
    def recall(self) -> dict[str, float]:
        """Recall on misses by predictor, an average that fades."""
        return dict(zip(PREDICTORS, self._recall.tolist(), strict=True))

    def guess(self, look: F32 | None, token: F32 | None, absent: NDArray[np.bool_]) -> Guess | None:
        """What the layer will want; None if there is nothing to go by.

        Args:
            look: float32 [experts], the layer's router logits on an earlier state.
            token: float32 [experts], log P(expert | token).
            absent: bool [experts], not in RAM now.
        """
        scores = np.empty((len(PREDICTORS), self._experts), np.float32)
        known = np.empty(len(PREDICTORS), np.bool_)
        inputs, said = np.empty(2 * self._experts, np.float32), np.empty(self._experts, np.float32)
        best = guess_scores(
            _NOTHING if look is None else look,
            _NOTHING if token is None else token,
            self._no_map if self._correction is None else self._correction.map,
            self._recall,
            self._counts,
            self._top_k,
            scores,
            known,
            inputs,
            said,
        )
        return None if best < 0 else Guess(scores, known, best, said, absent, inputs)

    def learn(self, guess: Guess, chosen: NDArray[np.int32], logits: F32) -> None:
        """The layer's router has spoken.

        Args:
            guess: what was said before.
            chosen: int32 [top_k], experts that it chose.
            logits: float32 [experts], its logits.
        """
        learn_scores(guess.by_predictor, guess.known, guess.absent, chosen, self._top_k, self._recall, self._counts)
        if self._correction is not None and guess.known[-1]:
            self._correction.learn(guess.inputs, logits - logits.mean())

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """What was learned, for a file: `recall`, `calibration`, and the sums of the map where there is one."""
        return {"recall": self._recall.copy(), "calibration": self._counts.copy()} | (
            self._correction.as_arrays() if self._correction is not None else {}
        )

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes the content of `as_arrays`; UsageError if it is none for such a layer."""
        recall, counts = arrays.get("recall"), arrays.get("calibration")
        if recall is None or counts is None or {len(recall), len(counts)} != {len(PREDICTORS)}:
            raise UsageError("a saved predictor does not know how good its guesses were")
        if not ((recall >= 0) & (recall <= 1)).all():
            raise UsageError("a saved predictor holds impossible numbers")
        restored = np.stack([checked_counts(part) for part in counts])
        if self._correction is not None:
            self._correction.restore(arrays)
        self._recall, self._counts = recall.astype(np.float64), restored
