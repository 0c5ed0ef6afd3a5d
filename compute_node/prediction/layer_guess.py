"""Which experts will one layer want? Several ways to tell, and for each layer the one that has told best so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node.prediction.calibration import Calibration, margins
from compute_node.prediction.correction import Correction
from tierd.errors import UsageError

__all__ = ["PREDICTORS", "Guess", "LayerGuess"]

F32 = NDArray[np.float32]

PREDICTORS: Final = ("look-ahead", "token table", "both", "corrected")
"""The layer's router on an earlier state; P(expert | token); their log scores added; a learned map of the two."""

_MOST_CORRECTED: Final = 128
"""Experts of a layer up to which the map is learned; its sums grow with the square."""
_SMOOTHING: Final = 1 / 64


@dataclass(frozen=True, slots=True)
class Guess:
    """What was said of one layer for one token.

    Attributes:
        scores: by predictor, float32 [experts]; only those that had something to go by.
        chosen_by: the predictor that was believed.
        probabilities: of being wanted, float32 [experts], by that one.
        absent: bool [experts], not in RAM when it was said.
        inputs: of the learned map.
    """

    scores: dict[str, F32]
    chosen_by: str
    probabilities: F32
    absent: NDArray[np.bool_]
    inputs: F32 | None


class LayerGuess:
    """Guesses for one layer from one distance, and what was learned of how good they are.

    Predictors are compared by recall on misses: the share of the wanted experts that were not in RAM among the
    `top_k` likeliest of a predictor. Probabilities are calibrated on the absent experts, since the others need no hint.

    Args:
        experts: of the layer.
        top_k: that its router chooses.
    """

    def __init__(self, experts: int, top_k: int) -> None:
        self._experts, self._top_k = experts, top_k
        self.recall = dict.fromkeys(PREDICTORS, 0.5)
        self.recall["corrected"] = 0.51  # among equals the one that learns
        self._calibration = {name: Calibration() for name in PREDICTORS}
        self._correction = Correction(2 * experts, experts) if experts <= _MOST_CORRECTED else None

    def guess(self, look: F32 | None, token: F32 | None, absent: NDArray[np.bool_]) -> Guess | None:
        """What the layer will want; None if there is nothing to go by.

        Args:
            look: float32 [experts], the layer's router logits on an earlier state.
            token: float32 [experts], log P(expert | token).
            absent: bool [experts], not in RAM now.
        """
        scores: dict[str, F32] = {}
        inputs = None
        if look is not None and not np.isfinite(look).all():
            look = None  # a torn read may leave anything in a sum
        if look is not None:
            look = look - look.mean()
            scores["look-ahead"] = look
        if token is not None:
            scores["token table"] = token
        if look is not None and token is not None:
            scores["both"] = look + token
        if look is not None and self._correction is not None:
            inputs = np.concatenate([look, np.zeros_like(look) if token is None else token])
            scores["corrected"] = self._correction.predict(inputs)
        if not scores:
            return None
        best = max(scores, key=lambda name: self.recall[name])
        probabilities = self._calibration[best].probability(margins(scores[best], self._top_k))
        return Guess(scores, best, probabilities, absent, inputs)

    def learn(self, guess: Guess, chosen: NDArray[np.int32], logits: F32) -> None:
        """The layer's router has spoken.

        Args:
            guess: what was said before.
            chosen: int32 [top_k], experts that it chose.
            logits: float32 [experts], its logits.
        """
        wanted = np.zeros(self._experts, np.bool_)
        wanted[chosen] = True
        missed = wanted & guess.absent
        misses = int(missed.sum())
        for name, scores in guess.scores.items():
            if misses:
                top = np.argpartition(-scores, self._top_k - 1)[: self._top_k]
                found = int(missed[top].sum()) / misses
                self.recall[name] += _SMOOTHING * (found - self.recall[name])
            margin = margins(scores, self._top_k)
            self._calibration[name].learn(margin[guess.absent], wanted[guess.absent])
        if guess.inputs is not None and self._correction is not None:
            self._correction.learn(guess.inputs, logits - logits.mean())

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """What was learned, for a file: `recall`, `calibration`, and the sums of the map where there is one."""
        return {
            "recall": np.array([self.recall[name] for name in PREDICTORS]),
            "calibration": np.stack([self._calibration[name].as_array() for name in PREDICTORS]),
        } | (self._correction.as_arrays() if self._correction is not None else {})

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes the content of `as_arrays`; UsageError if it is none for such a layer."""
        recall, calibration = arrays.get("recall"), arrays.get("calibration")
        if recall is None or calibration is None or {len(recall), len(calibration)} != {len(PREDICTORS)}:
            raise UsageError("a saved predictor does not know how good its guesses were")
        if not ((recall >= 0) & (recall <= 1)).all():
            raise UsageError("a saved predictor holds impossible numbers")
        for name, counts in zip(PREDICTORS, calibration, strict=True):
            self._calibration[name].restore(counts)
        if self._correction is not None:
            self._correction.restore(arrays)
        self.recall = dict(zip(PREDICTORS, recall.tolist(), strict=True))
