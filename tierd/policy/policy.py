"""The question that every eviction policy answers: who leaves RAM?

Policies are pure: no clock, no I/O, no randomness from outside. They see experts as flat numbers and uses in a fixed
order, so that the daemon, a replayed trace and a test run the very same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

__all__ = ["EvictionPolicy"]


@runtime_checkable
class EvictionPolicy(Protocol):
    """Keeps the order in which resident experts would leave. All operations take constant or logarithmic time."""

    name: str

    def inserted(self, expert: int) -> None:
        """`expert` became resident. Inserting a resident expert is an error of the caller."""

    def used(self, expert: int) -> None:
        """A router chose the resident `expert`."""

    def removed(self, expert: int) -> None:
        """`expert` left, by eviction or otherwise. Removing an absent expert is an error of the caller."""

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The resident expert of lowest keep-value among those that `evictable` accepts; None if there is none."""

    def __len__(self) -> int:
        """How many experts are resident."""
