"""How often each expert was used, with old uses counting ever less: what is remembered from one run to the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tierd.policy.policy import EvictionPolicy

__all__ = ["HALF_LIFE", "Recalls", "RecordedPolicy", "UsageCounts"]

HALF_LIFE: Final = 1024.0
"""Steps in which a use loses half its weight. A conversation or two: counts that only grow never follow a new text."""

_REBASE: Final = 500.0
"""Half-lives after which weights are scaled down again; a double has room for a thousand."""


class UsageCounts:
    """Uses of every expert of a store, decayed by steps; constant time for each use and step.

    Args:
        experts: of the store.
        half_life: in steps.

    Attributes:
        changes: uses counted, so that nobody writes down what has not changed.
    """

    def __init__(self, experts: int, half_life: float = HALF_LIFE) -> None:
        self.half_life = half_life
        self.changes = 0
        self._weights = [0.0] * experts  # in units of 2^(now / half_life), which spares decay any work
        self._now = 0.0
        self._scale = 1.0

    def __len__(self) -> int:
        return len(self._weights)

    def step(self) -> None:
        """Time goes on by one step."""
        self._now += 1.0
        self._scale = 2.0 ** (self._now / self.half_life)
        if self._now > _REBASE * self.half_life:
            self._weights = self.values().tolist()
            self._now, self._scale = 0.0, 1.0

    def used(self, expert: int) -> None:
        """A router chose `expert` in this step."""
        self.used_many((expert,))

    def used_many(self, experts: Collection[int]) -> None:
        """Routers chose these in this step."""
        weights, scale = self._weights, self._scale
        for expert in experts:
            weights[expert] += scale
        self.changes += len(experts)

    def values(self) -> NDArray[np.float64]:
        """Decayed uses as of now, float64 [experts]."""
        return np.array(self._weights) / self._scale

    def recall(self, values: NDArray[np.float64]) -> None:
        """Begin with what an earlier run counted, float64 [experts], finite and not negative."""
        self._weights = (np.array(self._weights) + values * self._scale).tolist()

    def rates(self) -> NDArray[np.float64]:
        """Uses per step that would have led here, had they been steady; float64 [experts]."""
        return self.values() * (1 - 2 ** (-1 / self.half_life))

    def hottest(self, most: int) -> list[int]:
        """At most so many experts that were used at all, the most used ones first."""
        values = self.values()
        order = np.argsort(-values, kind="stable")[:most]
        return [int(expert) for expert in order if values[expert] > 0]


@runtime_checkable
class Recalls(Protocol):
    """A policy that can begin with rates of earlier runs."""

    def recall(self, rates: NDArray[np.float64]) -> None:
        """Uses per step by flat number, float64 [experts]; told before anything is resident."""


class RecordedPolicy:
    """An `EvictionPolicy` that passes everything on to another, and counts the uses that it hears of.

    Args:
        policy: the other one.
        counts: where uses and steps go.
    """

    def __init__(self, policy: EvictionPolicy, counts: UsageCounts) -> None:
        self.name = policy.name
        self.counts = counts
        self._policy = policy
        self._steps: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._policy)

    def __repr__(self) -> str:
        return f"{self._policy!r}, recorded"

    def visit(self, session: int, step: int, layer: int, *, prefill: bool) -> None:
        """Time goes on by one when a session begins another step."""
        if self._steps.get(session) != step:
            self._steps[session] = step
            self.counts.step()
        self._policy.visit(session, step, layer, prefill=prefill)

    def expected(self, session: int, expectation: NDArray[np.uint8]) -> None:
        """Pass on."""
        self._policy.expected(session, expectation)

    def ended(self, session: int) -> None:
        """Forget the session's step."""
        self._steps.pop(session, None)
        self._policy.ended(session)

    def inserted(self, expert: int) -> None:
        """Pass on."""
        self._policy.inserted(expert)

    def used(self, expert: int) -> None:
        """Count it."""
        self.counts.used(expert)
        self._policy.used(expert)

    def used_many(self, experts: Iterable[int]) -> None:
        """Count them."""
        experts = list(experts)
        self.counts.used_many(experts)
        self._policy.used_many(experts)

    def removed(self, expert: int) -> None:
        """Pass on."""
        self._policy.removed(expert)

    def worth(self, expert: int) -> float | None:
        """Pass on."""
        return self._policy.worth(expert)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """Pass on."""
        return self._policy.victim(evictable)
