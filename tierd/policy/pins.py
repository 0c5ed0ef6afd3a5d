"""Pins: experts that somebody wants kept in RAM, as an input of whatever policy decides over the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from math import inf

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError
from tierd.policy.policy import EvictionPolicy

__all__ = ["PinnedPolicy"]


class PinnedPolicy:
    """An `EvictionPolicy` that keeps pinned residents out of another policy's sight.

    So a victim costs the same however many are pinned. A pinned expert still leaves when nothing else may: a request
    is never refused for the sake of a pin. Pins do not read: an expert that is pinned stays once it has come.

    Args:
        policy: decides over all that is not pinned.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.name = policy.name
        self._policy = policy
        self._pinned: set[int] = set()
        self._resident: set[int] = set()
        self._held: dict[int, None] = {}  # resident and pinned, the longest held first

    def __len__(self) -> int:
        return len(self._policy) + len(self._held)

    def __repr__(self) -> str:
        return f"{self._policy!r}, {len(self._pinned)} pinned"

    @property
    def pinned(self) -> Collection[int]:
        """Flat numbers of all pins, resident or not."""
        return self._pinned

    def pin(self, experts: Iterable[int]) -> None:
        """Keep these from now on."""
        for expert in experts:
            self._pinned.add(expert)
            if expert in self._resident and expert not in self._held:
                self._policy.removed(expert)
                self._held[expert] = None

    def unpin(self, experts: Iterable[int]) -> None:
        """Leave these to the policy again, as if they had just come in and been used."""
        for expert in experts:
            self._pinned.discard(expert)
            if expert in self._held:
                del self._held[expert]
                self._policy.inserted(expert)
                self._policy.used(expert)

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
        """Hold it if it is pinned, else pass on."""
        if expert in self._held:
            raise UsageError(f"expert {expert} is resident already and cannot be inserted again")
        if expert in self._pinned:
            self._held[expert] = None
        else:
            self._policy.inserted(expert)
        self._resident.add(expert)

    def used(self, expert: int) -> None:
        """Pass on what is not held."""
        if expert not in self._held:
            self._policy.used(expert)

    def used_many(self, experts: Iterable[int]) -> None:
        """Pass on those that are not held."""
        held = self._held
        self._policy.used_many([expert for expert in experts if expert not in held] if held else experts)

    def removed(self, expert: int) -> None:
        """It has left, pinned or not."""
        if expert in self._held:
            del self._held[expert]
        else:
            self._policy.removed(expert)
        self._resident.discard(expert)

    def worth(self, expert: int) -> float | None:
        """More than any guess for a pinned expert; else the other policy's answer."""
        return inf if expert in self._pinned else self._policy.worth(expert)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The other policy's victim; a pinned expert only if there is none."""
        victim = self._policy.victim(evictable)
        if victim is not None:
            return victim
        return next((expert for expert in self._held if evictable(expert)), None)
