"""The step that the engine computes now, and the wish to give it up: nobody wants it, or all are past their time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.cancel import CancelWord
from compute_node.serving.scheduler import Job, Share

__all__ = ["RunningStep"]


class RunningStep(CancelWord):
    """One object for all steps, one after the other. `begin` and `drop` are called under the engine's lock.

    Args:
        rows: most rows of a step.
        clock: seconds that never go back.

    Attributes:
        shares: whose tokens the step computes.
    """

    __slots__ = ("_clock", "_deadline", "_rows", "_unwanted", "shares")

    def __init__(self, rows: int, clock: Callable[[], float]) -> None:
        super().__init__()
        self.shares: Sequence[Share] = ()
        self._unwanted = np.zeros(rows, np.bool_)
        self._rows = 0
        self._deadline = math.inf
        self._clock = clock

    def begin(self, shares: Sequence[Share], deadline: float) -> None:
        """A step begins that is wanted until the deadline."""
        self.clear()
        self.shares = shares
        self._rows = sum([share.count for share in shares])
        self._unwanted[: self._rows] = False
        self._deadline = deadline

    @property
    def unwanted(self) -> NDArray[np.bool_]:
        """Bool [rows], which rows nobody wants any more; changes while the step runs."""
        return self._unwanted[: self._rows]

    def __call__(self) -> bool:
        """Whether to give it up."""
        return super().__call__() or (self._deadline < math.inf and self._clock() >= self._deadline)

    def drop(self, job: Job) -> None:
        """Nobody wants the job any more."""
        first = 0
        for share in self.shares:
            if share.job is job:
                self._unwanted[first : first + share.count] = True
                if self.unwanted.all():
                    self.cancel()
                return
            first += share.count
