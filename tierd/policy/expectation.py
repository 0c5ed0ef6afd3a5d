"""What a node expects to use soon: one byte per expert, written as a step goes on, read by the daemon's policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError
from tierd.policy.token_table import ChoiceTable, TokenTable

__all__ = ["Expectation"]

_NEXT_STEP: Final = 0.5
"""Worth of a use in the next step against one in this step; fitted on the training trace, flat from 0.4 to 0.6."""

_LEAST: Final = 5
"""Expectations below 5/255 are written as 0: they would cost the policy work and change nothing."""


class Expectation:
    """Turns the token of a step into expectations, layer by layer, and learns from what the routers then chose.

    A step is `begin`, then `passed` for each layer in rising order, then `end`. Before a layer is passed its bytes
    say how likely this step wants an expert; afterwards how likely the next step does, weighted by half, since it
    is further away. Tokens of a prompt that are computed together expect together.

    Args:
        table: counts by token; shared with nobody while a step runs.
        out: uint8 [experts], by flat number, in 255ths; written in place. None: an array of its own.
    """

    def __init__(self, table: TokenTable, out: NDArray[np.uint8] | None = None) -> None:
        self.table = table
        self.out = np.zeros(table.experts, np.uint8) if out is None else out
        if self.out.dtype != np.uint8 or self.out.shape != (table.experts,):
            raise UsageError(f"expectations of {table.experts} experts do not fit an array of {self.out.shape}")
        self._tokens: list[int] = []
        self._after = np.zeros(table.experts, np.uint8)

    def begin(self, tokens: Sequence[int], *, ends: Sequence[int] = ()) -> None:
        """A step begins that computes on these tokens, at least one.

        Args:
            tokens: in the order of the text.
            ends: where they are of several texts, the last one of each: what the next step will go on from.
        """
        self._tokens = list(tokens)
        self.out[:] = self._together(self.table.now, tokens, 1.0)
        self._after = self._together(self.table.after, ends or tokens[-1:], _NEXT_STEP)

    def passed(self, layer: int) -> None:
        """The step has what it wanted of a layer, given by its place among the layers with routed experts."""
        begin, end = self.table.starts[layer], self.table.starts[layer + 1]
        self.out[begin:end] = self._after[begin:end]

    def end(self, experts: NDArray[np.int32], *, previous: int | None) -> None:
        """The step is complete: learn from it.

        Args:
            experts: int32 [tokens, layers, top_k], flat numbers of what the routers chose.
            previous: the token before the first one in the same text, if there is one.
        """
        for token, chosen in zip(self._tokens, experts, strict=True):
            self.table.count(token, chosen, previous=previous)
            previous = token

    def _together(self, table: ChoiceTable, tokens: Sequence[int], worth: float) -> NDArray[np.uint8]:
        """How likely at least one of the tokens goes with an expert, times `worth`, in 255ths."""
        absent = np.ones(self.table.experts, np.float32)
        for token in tokens:
            found = table.probabilities(token)
            if found is not None:
                experts, probabilities = found
                known = experts >= 0
                absent[experts[known]] *= 1 - probabilities[known]
        return _as_bytes((1 - absent) * np.float32(worth))


def _as_bytes(probabilities: NDArray[np.float32]) -> NDArray[np.uint8]:
    values = (probabilities * np.float32(255) + np.float32(0.5)).astype(np.uint8)
    values[values < _LEAST] = 0
    return values
