"""Says which tokens steps compute on, and leaves the guessing to the daemon."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierd.client.source import ExpertSource

__all__ = ["Saying"]

_MOST_ROWS = 4
"""Rows of a step up to which the daemon guesses from its tokens."""


class Saying:
    """A `StepHints` that costs the node one message per step.

    Args:
        source: hears the tokens.
    """

    active = False
    """A step is never looked ahead of."""
    everywhere = False
    """Not anywhere."""
    asleep = True
    """What nothing is lacking for need not be said."""

    def __init__(self, source: ExpertSource) -> None:
        self._source = source

    def begin(self, tokens: Sequence[int], *, step: int, decode: bool) -> None:
        """A step begins that computes on these tokens."""
        if decode and len(tokens) <= _MOST_ROWS:
            self._source.say_tokens(tokens, step=step)

    def passing(self, layer: int, routes: NDArray[np.int32]) -> None:
        """Nothing is guessed here."""

    def at(self, layer: int, routes: NDArray[np.int32]) -> None:
        """Nothing is learned here."""

    def meanwhile(self, layer: int, known: NDArray[np.float32]) -> None:
        """Nothing is guessed here."""

    def end(self, seconds: float) -> None:
        """Nothing is measured here."""
