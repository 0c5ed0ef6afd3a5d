"""S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023): three queues, no promotion."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tierd.policy.residents import ResidentPolicy, first_evictable

__all__ = ["S3Fifo"]

_SMALL_SHARE: Final = 0.1
_MOST_USES: Final = 3


@dataclass(slots=True)
class _Mark:
    uses: int = -1  # the use that an expert was read for is not counted


class S3Fifo(ResidentPolicy[_Mark]):
    """A small queue filters what is used once; what was used in it moves to the main queue; a ghost queue remembers.

    An expert that left the small queue and comes back while the ghost queue, as long as the main one, still knows it
    goes straight to the main queue. There a used expert goes round once per use, up to three. Constant time per
    operation, averaged over the uses that pay for the rounds.
    """

    name = "s3fifo"

    def __init__(self) -> None:
        super().__init__()
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The oldest of the small queue while that is over its share, else of the main queue; unused ones only."""
        found = None
        if not self._main or len(self._small) > _SMALL_SHARE * len(self):
            found = self._from_small(evictable)
        if found is None:
            found = self._from_main(evictable)
        return found if found is not None else self._any(evictable)

    def _from_small(self, evictable: Callable[[int], bool]) -> int | None:
        for expert in list(self._small):
            if self._resident[expert].uses > 0:
                del self._small[expert]
                self._main[expert] = None
                self._resident[expert].uses = 0
            elif evictable(expert):
                return expert
        return None

    def _from_main(self, evictable: Callable[[int], bool]) -> int | None:
        for _ in range((_MOST_USES + 1) * len(self._main)):
            found = next((e for e in self._main if evictable(e) or self._resident[e].uses > 0), None)
            if found is None or self._resident[found].uses <= 0:
                return found
            self._resident[found].uses -= 1
            self._main.move_to_end(found)
        return None

    def _any(self, evictable: Callable[[int], bool]) -> int | None:
        found = first_evictable(self._small, evictable)
        return found if found is not None else first_evictable(self._main, evictable)

    def _enter(self, expert: int) -> _Mark:
        if expert in self._ghost:
            del self._ghost[expert]
            self._main[expert] = None
        else:
            self._small[expert] = None
        return _Mark()

    def _use(self, expert: int) -> None:
        mark = self._resident[expert]
        mark.uses = min(mark.uses + 1, _MOST_USES)

    def _leave(self, expert: int, mark: _Mark) -> None:
        del mark
        if expert in self._main:
            del self._main[expert]
            return
        del self._small[expert]
        self._ghost[expert] = None
        while len(self._ghost) > max(1, len(self._main)):
            self._ghost.popitem(last=False)
