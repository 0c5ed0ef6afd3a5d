"""What a step of many rows, a prompt, will want of the next layer: the union of what its rows will choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compute_node.kernels import Segment
from compute_node.models.look_ahead import LOOK_AHEAD_ROWS, LookAhead
from compute_node.prediction.calibration import count_chosen, first_counts, margins, probabilities

__all__ = ["UnionGuess"]

F32 = NDArray[np.float32]

_MOST_LOOKED_AT: Final = 64
"""Rows whose router is asked; of more, these many are taken as a sample."""


class UnionGuess:
    """Asks the next router about each row, and learns how far that is to be believed.

    Args:
        look: routers of layers to come.
        run: runs a segment.
        layers: model layers with routed experts, by place.
        top_k: that a router chooses.
    """

    def __init__(self, look: LookAhead, run: Callable[[Segment], object], layers: list[int], top_k: int) -> None:
        self._look = look
        self._run = run
        self._layers = layers
        self._top_k = top_k
        self._counts = [first_counts() for _ in layers]
        self._said: tuple[int, NDArray[np.intp], F32, NDArray[np.bool_]] | None = None

    def forget(self) -> None:
        """A step begins: nothing was said of it."""
        self._said = None

    def wanted(self, place: int, known: F32, absent: NDArray[np.bool_]) -> F32:
        """Probability that at least one row wants an expert of a layer: float32 [experts].

        Args:
            place: of the layer that is guessed; the step waits at the one before it.
            known: float32 [rows, H], what the experts that are there add to each row.
            absent: bool [experts], not in RAM now.
        """
        look, rows = self._look, len(known)
        sample = np.unique(np.linspace(0, rows - 1, min(rows, _MOST_LOOKED_AT)).astype(np.intp))
        logits = np.empty((len(sample), len(absent)), np.float32)
        for first in range(0, len(sample), LOOK_AHEAD_ROWS):
            part = sample[first : first + LOOK_AHEAD_ROWS]
            look.start_from(part, known[part])
            self._run(look.segment(self._layers[place]))
            logits[first : first + len(part)] = look.logits[: len(part), : len(absent)]
        # A torn read may leave anything in a sum.
        margin = margins(np.nan_to_num(logits, nan=0.0, posinf=0.0, neginf=0.0), self._top_k)
        self._said = place, sample, margin, absent
        by_nobody = np.prod(1 - probabilities(self._counts[place], margin), axis=0)
        result: F32 = 1 - by_nobody ** np.float32(rows / len(sample))
        return result

    def learn(self, place: int, routes: NDArray[np.int32]) -> None:
        """The layer's router has chosen: int32 [rows, top_k]."""
        if self._said is None or self._said[0] != place or self._said[1][-1] >= len(routes):
            return
        _, sample, margin, absent = self._said
        self._said = None
        chosen = np.zeros(margin.shape, np.bool_)
        np.put_along_axis(chosen, routes[sample].astype(np.intp), values=True, axis=1)
        count_chosen(self._counts[place], margin, chosen, np.tile(absent, (len(margin), 1)))
