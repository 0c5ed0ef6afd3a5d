"""Keeps the daemon told of what this node expects to use, and learns from what its routers choose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierd.client.source import StepMemory
from tierd.policy.expectation import Expectation
from tierd.policy.token_table import TokenTable
from tierd.store.geometry import Geometry

__all__ = ["Foresight"]

_QUIET_STEPS: Final = 64
"""After so many steps in a row that waited for nothing, all is resident and nobody needs to be told anything."""


class Foresight:
    """Writes expectations into the session's memory as steps go on; changes no bit of what is computed.

    A step is `begin`, `at` for each layer where the step stopped for experts, and `end` when it is complete; a step
    that was given up has no `end`. What native code did between the stops is brought up to date at the next one.

    Args:
        geometry: of the store.
        max_bytes: bound on the memory of the token tables.

    Attributes:
        asleep: nothing has been waited for in a long time, or nobody listens: a step need not begin and end here, only
            say where it stops, and whether it waited.
    """

    def __init__(self, geometry: Geometry, *, max_bytes: int = 64 << 20) -> None:
        self._places = {entry.layer: place for place, entry in enumerate(geometry.layers)}
        self._top_k = geometry.top_k
        self._expectation = Expectation(TokenTable([entry.experts for entry in geometry.layers], max_bytes=max_bytes))
        self._starts = np.array(self._expectation.table.starts, np.int32)
        self._memory: StepMemory | None = None
        self._rows: list[tuple[int, int, int]] = []  # token, position and sequence of each row
        self._seen: dict[int, NDArray[np.int32]] = {}  # place of a layer -> its routes
        self._passed = 0
        self._quiet = 0
        self.asleep = False
        self._last: dict[int, tuple[int, int]] = {}  # sequence -> position and token of its last row

    @property
    def table(self) -> TokenTable:
        """What was counted."""
        return self._expectation.table

    def begin(
        self,
        memory: StepMemory | None,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Iterable[int],
    ) -> None:
        """A step begins.

        Args:
            memory: where to write, and where uses can be seen; None: nobody listens, and nothing is done.
            tokens: of the rows.
            positions: of each token in its sequence.
            sequences: of each row the number of its sequence.
        """
        self._memory = memory if self._quiet < _QUIET_STEPS else None
        self._seen.clear()
        self._passed = 0
        self._quiet += 1
        self.asleep = self._quiet > _QUIET_STEPS or memory is None
        if self._memory is None:
            return
        self._rows = list(zip(tokens, positions, sequences, strict=True))
        self._expectation.out = self._memory.expect
        ends = {sequence: token for token, _, sequence in self._rows}
        self._expectation.begin([token for token, _, _ in self._rows], ends=list(ends.values()))

    def at(self, layer: int, routes: NDArray[np.int32]) -> None:
        """The step stops at a model layer, whose experts it may have to wait for: int32 [rows, top_k] numbers."""
        if self._memory is None:
            return
        place = self._places[layer]
        self._seen[place] = routes + self._starts[place]
        while self._passed < place:
            self._expectation.passed(self._passed)
            self._passed += 1

    def waited(self) -> None:
        """The step had to wait for experts."""
        self._quiet, self.asleep = 0, False

    def end(self, step: int) -> None:
        """The step with this number is complete."""
        if self._memory is None:
            return
        layers = len(self._places)
        for place in range(self._passed, layers):
            self._expectation.passed(place)
        if len(self._seen) == layers:
            chosen = np.stack([self._seen[place] for place in range(layers)], axis=1)
        else:
            chosen = self._uses(self._memory, step)
        for (token, previous), experts in zip(self._followed(), chosen, strict=False):
            self.table.count(token, experts, previous=previous)

    def _uses(self, memory: StepMemory, step: int) -> NDArray[np.int32]:
        """The routes of a step of one row, as the session's memory shows its uses; none where it cannot."""
        layers = len(self._places)
        none = np.zeros((0, layers, self._top_k), np.int32)
        if len(self._rows) != 1:
            return none
        used = np.flatnonzero(memory.last_step == step & 0xFFFFFFFF).astype(np.int32)
        if len(used) != layers * self._top_k:
            return none
        by_layer = used.reshape(layers, self._top_k)
        complete = np.all((by_layer >= self._starts[:-1, None]) & (by_layer < self._starts[1:, None]))
        return by_layer[None] if complete else none

    def _followed(self) -> Iterator[tuple[int, int | None]]:
        """Each row's token, and the one before it in its sequence, if that was seen."""
        for token, position, sequence in self._rows:
            before, previous = self._last.get(sequence, (-2, 0))
            yield token, previous if before == position - 1 else None
            self._last[sequence] = (position, token)
