"""Least recently used: the expert whose last use is the longest ago leaves first."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from tierd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Lru"]


class Lru:
    """One queue over all layers, oldest use first. Constant time, plus one step per expert that a victim skips.

    Experts that may not leave were mostly used in this step or the last, so they stand at the far end.
    """

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __repr__(self) -> str:
        return f"lru: {len(self._order)} experts"

    def inserted(self, expert: int) -> None:
        """`expert` became resident and is now the youngest; UsageError if it is resident already."""
        if expert in self._order:
            raise UsageError(f"expert {expert} is resident already and cannot be inserted again")
        self._order[expert] = None

    def used(self, expert: int) -> None:
        """`expert` is now the youngest; UsageError if it is not resident."""
        try:
            self._order.move_to_end(expert)
        except KeyError:
            raise UsageError(f"expert {expert} is not resident and cannot be used") from None

    def removed(self, expert: int) -> None:
        """`expert` left; UsageError if it is not resident."""
        try:
            del self._order[expert]
        except KeyError:
            raise UsageError(f"expert {expert} is not resident and cannot be removed") from None

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The expert with the oldest use among those that `evictable` accepts; it stays until `removed`."""
        return next((expert for expert in self._order if evictable(expert)), None)
