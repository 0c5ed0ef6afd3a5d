"""The question that every eviction policy answers: who leaves RAM?

Policies are pure: no clock, no I/O, no randomness from outside. They see experts as flat numbers and uses in a fixed
order, so that the daemon, a replayed trace and a test run the very same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = ["EvictionPolicy"]


@runtime_checkable
class EvictionPolicy(Protocol):
    """Keeps the order in which resident experts would leave. All operations take constant or logarithmic time.

    A request for a layer's experts is told like this: `visit`, `expected` where the session expects anything, `used`
    for the experts that are resident, in router order; then, for the others, as many `victim` and `removed` as room
    is needed, and `inserted` and `used` for each, in router order. An expert that is read ahead of its use is only
    `inserted`.
    """

    name: str

    def visit(self, session: int, step: int, layer: int, *, prefill: bool) -> None:
        """The uses that follow are those of `session`, in its `step`, at model layer `layer`.

        Steps of a session rise, and so do layers within a step. `prefill` is False for a decode step.
        """

    def expected(self, session: int, expectation: NDArray[np.uint8]) -> None:
        """What `session` expects to use soon: uint8 [experts], by flat number, in 255ths; it replaces the last one.

        The array is not kept. Experts beyond its end are not expected.
        """

    def ended(self, session: int) -> None:
        """The session expects nothing any more and has no step. Harmless for an unknown one."""

    def inserted(self, expert: int) -> None:
        """`expert` became resident. Inserting a resident expert is an error of the caller."""

    def used(self, expert: int) -> None:
        """A router chose the resident `expert`."""

    def used_many(self, experts: Iterable[int]) -> None:
        """Routers chose these resident experts, in this order: `used` for each of them."""

    def removed(self, expert: int) -> None:
        """`expert` left, by eviction or otherwise. Removing an absent expert is an error of the caller."""

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The resident expert of lowest keep-value among those that `evictable` accepts; None if there is none."""

    def worth(self, expert: int) -> float | None:
        """Uses that are to be expected of `expert`, resident or not, per step; None if this policy does not know.

        It is what a prefetch is measured against: a guess takes the slot of an expert that is worth less only.
        """

    def __len__(self) -> int:
        """How many experts are resident."""
