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

from tierd.differing import changed
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
        self._by_session: dict[int, bytes] = {}
        self._total: list[int] = []  # by expert: what all sessions expect of it, in 255ths

    def expected(self, session: int, expectation: NDArray[np.uint8]) -> None:
        """Takes the session's new expectation in place of its last one."""
        self._expect(session, expectation.tobytes())

    def ended(self, session: int) -> None:
        """What the session expected is not expected any more."""
        super().ended(session)
        self.ended_expectation(session)

    def ended_expectation(self, session: int) -> None:
        """The session expects nothing until it says so."""
        self._expect(session, bytes(len(self._by_session.get(session, b""))))
        self._by_session.pop(session, None)

    def _expect(self, session: int, expectation: bytes) -> None:
        last, size = self._by_session.get(session), len(expectation)
        if last is None or len(last) != size:
            if last is not None:
                self.ended_expectation(session)
            last = bytes(size)
            self._total.extend([0] * (size - len(self._total)))
        self._by_session[session] = expectation
        total, resident, heap, weights, now = self._total, self._resident, self._heap, self._weights, self._now
        for expert in changed(expectation, last):
            more = expectation[expert] - last[expert]
            total[expert] += more
            if expert in resident:
                self._set_at[expert] = now
                if more < 0:
                    heap.fell(expert, weights[expert])
                else:
                    heap.rose(expert)

    def _keep_value(self, expert: int, at: float) -> float:
        weight = super()._keep_value(expert, at)
        expected = self._total[expert] if expert < len(self._total) else 0
        if expected == 0:
            return weight
        return at + log2(self._scale * expected + 2 ** max(weight - at, -1000.0))
