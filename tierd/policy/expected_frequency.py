"""Decayed frequency plus what the nodes expect: the default.

A node knows the token that it computes on, and so which experts the layers to come will probably want, and which ones
the next step will want of the layers that it has passed (`tierd.policy.expectation`). That is worth more than any
refinement of recency and frequency; tests/bench/README.md has the figures.
"""

from __future__ import annotations

from math import log2
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierd.policy.decayed_frequency import DEFAULT_HALF_LIFE, DecayedFrequency

__all__ = ["ExpectedFrequency"]

_WEIGHT: Final = 1.4
"""Worth of a certain use against a rate of one use per step; fitted on the training trace, flat from 1 to 2."""


class ExpectedFrequency(DecayedFrequency):
    """Keep-value: uses per step, decayed, plus a weight times what all sessions together expect.

    An expectation that its session does not renew ages like a use. Where nobody expects anything the order is that
    of `DecayedFrequency`. Only experts whose expectation changed cost work: a number that the nodes' tables bound,
    whatever the size of the arena.
    """

    name = "expected-frequency"

    def __init__(self, half_life: float = DEFAULT_HALF_LIFE, *, weight: float = _WEIGHT) -> None:
        super().__init__(half_life)
        # A steady use once per step sums to 1 / (1 - 2^(-1/half_life)); an expectation is scaled up to that.
        self._scale = weight / 255 / (1 - 2 ** (-1 / half_life))
        self._by_session: dict[int, NDArray[np.uint8]] = {}
        self._total = np.zeros(0, np.int32)

    def expected(self, session: int, expectation: NDArray[np.uint8]) -> None:
        """Takes the session's new expectation in place of its last one."""
        size = len(expectation)
        last = self._by_session.get(session)
        if last is None or len(last) != size:
            self.ended_expectation(session)
            last = self._by_session[session] = np.zeros(size, np.uint8)
            if len(self._total) < size:
                self._total = np.concatenate([self._total, np.zeros(size - len(self._total), np.int32)])
        changed = np.flatnonzero(last != expectation)
        self._total[changed] += expectation[changed].astype(np.int32) - last[changed]
        last[changed] = expectation[changed]
        self._value_anew(changed)

    def ended(self, session: int) -> None:
        """What the session expected is not expected any more."""
        super().ended(session)
        self.ended_expectation(session)

    def ended_expectation(self, session: int) -> None:
        """The session expects nothing until it says so."""
        last = self._by_session.pop(session, None)
        if last is not None:
            self._total[: len(last)] -= last
            self._value_anew(np.flatnonzero(last))

    def _value_anew(self, changed: NDArray[np.intp]) -> None:
        for expert in changed.tolist():
            if expert in self._resident:
                self._heap.put(expert, self._keep_value(expert))

    def _keep_value(self, expert: int) -> float:
        weight = super()._keep_value(expert)
        expected = int(self._total[expert]) if expert < len(self._total) else 0
        if expected == 0:
            return weight
        return self._now + log2(self._scale * expected + 2 ** max(weight - self._now, -1000.0))
