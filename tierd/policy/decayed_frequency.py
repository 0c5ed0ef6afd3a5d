"""Decayed frequency: the expert with the fewest uses per step leaves first, where old uses count ever less.

The idea is that of LRFU (Lee et al., IEEE Transactions on Computers 50(12), 2001), with time counted in steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from math import inf, log2
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError
from tierd.policy.residents import ResidentPolicy
from tierd.policy.rising_heap import RisingHeap

__all__ = ["DEFAULT_HALF_LIFE", "DecayedFrequency"]

DEFAULT_HALF_LIFE: Final = 64.0
"""Steps in which a use loses half its weight: the best of 8 to 512 on the training trace (tests/bench/README.md)."""


class DecayedFrequency(ResidentPolicy[None]):
    """Keep-value: the sum over an expert's uses of 2^(-age / half-life), age in steps of all sessions.

    Decay needs no work: with `now` the running number of the step, the sum times 2^(now / half-life) does not change
    between uses, and orders experts in the same way. Its binary logarithm is what is stored, so that it never
    overflows. Uses are remembered for all experts of the store, resident or not. In a prefill step an expert counts
    one use however many tokens chose it, so a long prompt raises all experts alike and the decode working set stays.
    """

    name = "decayed-frequency"

    def __init__(self, half_life: float = DEFAULT_HALF_LIFE) -> None:
        super().__init__()
        if not 0 < half_life <= 1e9:
            raise UsageError(f"a half-life of {half_life:g} steps is outside 0 (exclusive) to 1e9")
        self.half_life = half_life
        self._now = 0.0  # steps begun, by all sessions, in half-lives
        self._steps: dict[int, int] = {}
        self._weights = array("d")  # by expert: log2 of its sum, as if all uses were moved to step 0
        self._set_at = array("d")  # by expert: when its keep-value was set last
        self._heap = RisingHeap(self._value)

    @property
    def moves(self) -> int:
        """Work done so far, in entries of the heap that were moved."""
        return self._heap.moves

    def visit(self, session: int, step: int, layer: int, *, prefill: bool) -> None:
        """Time goes on by one when a session begins another step."""
        del layer, prefill
        if self._steps.get(session) != step:
            self._steps[session] = step
            self._now += 1 / self.half_life

    def ended(self, session: int) -> None:
        """The session's step is forgotten; its uses are not."""
        self._steps.pop(session, None)

    def recall(self, rates: NDArray[np.float64]) -> None:
        """Begin with rates of earlier runs, uses per step, float64 [experts]; they age like uses of this moment."""
        steady = 1 - 2 ** (-1 / self.half_life)  # a steady use per step sums to the inverse of this
        self._make_place(len(rates) - 1)
        for expert in np.flatnonzero(rates > 0).tolist():
            self._weights[expert] = self._now + log2(rates[expert] / steady)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The expert of the lowest keep-value; among equals the one whose value was set the longest ago."""
        return self._heap.lowest(evictable)

    def worth(self, expert: int) -> float:
        """Uses per step: the rate at which steady uses would have the same keep-value."""
        return float(2 ** (self._keep_value(expert, self._now) - self._now) * (1 - 2 ** (-1 / self.half_life)))

    def used_many(self, experts: Iterable[int]) -> None:
        """See `EvictionPolicy`."""
        resident, weights, set_at, rose, now = self._resident, self._weights, self._set_at, self._heap.rose, self._now
        for expert in experts:
            if expert not in resident:
                raise self._not_used(expert)
            weights[expert] = now + log2(1 + 2 ** max(weights[expert] - now, -1000.0))
            set_at[expert] = now
            rose(expert)

    def _value(self, expert: int) -> float:
        return self._keep_value(expert, self._set_at[expert])

    def _keep_value(self, expert: int, at: float) -> float:
        """As it was or would be set at a time."""
        del at
        return self._weights[expert] if expert < len(self._weights) else -inf

    def _enter(self, expert: int) -> None:
        self._make_place(expert)
        self._set_at[expert] = self._now
        self._heap.enter(expert, self._weights[expert])

    def _use(self, expert: int) -> None:
        self.used_many((expert,))

    def _leave(self, expert: int, mark: None) -> None:
        del mark
        self._heap.drop(expert)

    def _make_place(self, expert: int) -> None:
        more = expert + 1 - len(self._weights)
        if more > 0:
            more += len(self._weights) // 2
            self._weights.extend([-inf] * more)
            self._set_at.extend([0.0] * more)
