"""Which experts will the first layers want in the next step? A probability that is known without a router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node.prediction.calibration import checked_counts, count_chosen, plain_counts, probabilities
from compute_node.prediction.native import REACH
from tierd.errors import UsageError

__all__ = ["NextGuess", "NextSaid"]

F32 = NDArray[np.float32]

_WHOLE: Final = np.float32(REACH)


@dataclass(frozen=True, slots=True)
class NextSaid:
    """What was said of one layer for one token to come.

    Attributes:
        scaled: float32 [experts], the probability given, on the scale of calibration.
        probabilities: float32 [experts], what it was worth so far.
        absent: bool [experts], not in RAM when it was said.
    """

    scaled: F32
    probabilities: F32
    absent: NDArray[np.bool_]


class NextGuess:
    """Calibrates probabilities for one layer: what is said to be so likely, how often did it come true?

    It is counted on the absent experts, since the others need no hint.
    """

    def __init__(self) -> None:
        self._counts = plain_counts()

    def guess(self, likely: F32, absent: NDArray[np.bool_]) -> NextSaid:
        """What the layer will want.

        Args:
            likely: float32 [experts], probability of being chosen.
            absent: bool [experts], not in RAM now.
        """
        scaled = (2 * likely - 1) * _WHOLE
        return NextSaid(scaled, probabilities(self._counts, scaled), absent)

    def learn(self, said: NextSaid, chosen: NDArray[np.int32]) -> None:
        """The layer's router has chosen: int32 [top_k]."""
        wanted = np.zeros(len(said.absent), np.bool_)
        wanted[chosen[chosen >= 0]] = True
        count_chosen(self._counts, said.scaled, wanted, said.absent)

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """What was learned, for a file: `calibration`."""
        return {"calibration": self._counts.copy()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes the content of `as_arrays`; UsageError if it is none."""
        counts = arrays.get("calibration")
        if counts is None:
            raise UsageError("a saved predictor does not know how good its guesses of the next token were")
        self._counts = checked_counts(counts)
