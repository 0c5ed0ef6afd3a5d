"""Least recently used: the expert whose last use is the longest ago leaves first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from tierd.policy.residents import ResidentPolicy, first_evictable

__all__ = ["Lru"]


class Lru(ResidentPolicy[None]):
    """One queue over all layers, oldest use first. Constant time, plus one step per expert that a victim skips.

    Experts that may not leave were mostly used in this step or the last, so they stand at the far end.
    """

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self._order: OrderedDict[int, None] = OrderedDict()

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The expert with the oldest use among those that `evictable` accepts; it stays until `removed`."""
        return first_evictable(self._order, evictable)

    def _enter(self, expert: int) -> None:
        self._order[expert] = None

    def _use(self, expert: int) -> None:
        self._order.move_to_end(expert)

    def _leave(self, expert: int, mark: None) -> None:
        del mark
        del self._order[expert]
