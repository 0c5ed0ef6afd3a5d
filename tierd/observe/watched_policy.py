"""A policy that tells of evictions: an expert that is removed while it was resident has left RAM for another."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from tierd.policy.policy import EvictionPolicy

__all__ = ["WatchedPolicy"]


class WatchedPolicy:
    """An `EvictionPolicy` that passes everything on to another.

    Args:
        policy: the other one.
        evicted: called with the flat number of each expert that is evicted.
    """

    def __init__(self, policy: EvictionPolicy, evicted: Callable[[int], None]) -> None:
        self.name = policy.name
        self._policy = policy
        self._evicted = evicted
        self._victim: int | None = None

    def __len__(self) -> int:
        return len(self._policy)

    def __repr__(self) -> str:
        return f"{self._policy!r}, watched"

    def visit(self, session: int, step: int, layer: int, *, prefill: bool) -> None:
        """Pass on."""
        self._policy.visit(session, step, layer, prefill=prefill)

    def expected(self, session: int, expectation: NDArray[np.uint8]) -> None:
        """Pass on."""
        self._policy.expected(session, expectation)

    def ended(self, session: int) -> None:
        """Pass on."""
        self._policy.ended(session)

    def inserted(self, expert: int) -> None:
        """Pass on."""
        self._policy.inserted(expert)

    def used(self, expert: int) -> None:
        """Pass on."""
        self._policy.used(expert)

    def used_many(self, experts: Iterable[int]) -> None:
        """Pass on."""
        self._policy.used_many(experts)

    def removed(self, expert: int) -> None:
        """Pass on; tell if it was chosen to leave. A read that failed or was taken back is no eviction."""
        self._policy.removed(expert)
        if expert == self._victim:
            self._victim = None
            self._evicted(expert)

    def worth(self, expert: int) -> float | None:
        """Pass on."""
        return self._policy.worth(expert)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """Pass on, and remember the answer."""
        self._victim = self._policy.victim(evictable)
        return self._victim
