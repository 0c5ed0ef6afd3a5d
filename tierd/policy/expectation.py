"""What a node expects to use soon: one byte per expert, written as a step goes on, read by the daemon's policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError
from tierd.policy.token_table import TokenTable

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
        self._after: list[tuple[NDArray[np.int32], NDArray[np.uint8]]] | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        """A step begins that computes on these tokens, at least one, in the order of the text."""
        self._tokens = list(tokens)
        absent = np.ones(self.table.experts, np.float32)
        for token in tokens:
            found = self.table.now.probabilities(token)
            if found is not None:
                experts, probabilities = found
                known = experts >= 0
                absent[experts[known]] *= 1 - probabilities[known]
        self.out[:] = _as_bytes(1 - absent)
        found = self.table.after.probabilities(tokens[-1])
        self._after = None
        if found is not None:
            self._after = list(zip(found[0], _as_bytes(found[1] * np.float32(_NEXT_STEP)), strict=True))

    def passed(self, layer: int) -> None:
        """The step has what it wanted of a layer, given by its place among the layers with routed experts."""
        self.out[self.table.starts[layer] : self.table.starts[layer + 1]] = 0
        if self._after is not None:
            experts, values = self._after[layer]
            known = experts >= 0
            self.out[experts[known]] = values[known]

    def end(self, experts: NDArray[np.int32], *, previous: int | None) -> None:
        """The step is complete: learn from it.

        Args:
            experts: int32 [tokens, layers, top_k], flat numbers of what the routers chose.
            previous: the token before the first one in the same text, if there is one.
        """
        for token, chosen in zip(self._tokens, experts, strict=True):
            self.table.count(token, chosen, previous=previous)
            previous = token


def _as_bytes(probabilities: NDArray[np.float32]) -> NDArray[np.uint8]:
    values = (probabilities * np.float32(255) + np.float32(0.5)).astype(np.uint8)
    values[values < _LEAST] = 0
    return values
