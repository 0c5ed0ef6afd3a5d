"""Least frequent recently used (Bilal and Kang, arXiv 1702.04078): a privileged LRU part over an LFU part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from tierd.policy.keep_heap import KeepHeap
from tierd.policy.residents import ResidentPolicy, first_evictable

__all__ = ["Lfru"]

_PRIVILEGED_SHARE: Final = 0.5


class Lfru(ResidentPolicy[None]):
    """New experts enter the unprivileged part, where the one with the fewest uses leaves first.

    A use there, after the one that an expert was read for, lifts it into the privileged part, a plain LRU queue.
    When that holds more than half of all experts, its oldest one goes back among the unprivileged with its count of
    uses. Counts end when an expert leaves. Logarithmic time.
    """

    name = "lfru"

    def __init__(self) -> None:
        super().__init__()
        self._privileged: OrderedDict[int, None] = OrderedDict()
        self._unprivileged = KeepHeap()
        self._uses: dict[int, int] = {}

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The least used of the unprivileged, the longest there among equals; else the oldest privileged one."""
        found = self._unprivileged.lowest(evictable)
        return found if found is not None else first_evictable(self._privileged, evictable)

    def _enter(self, expert: int) -> None:
        self._uses[expert] = 0
        self._unprivileged.put(expert, 0.0)

    def _use(self, expert: int) -> None:
        self._uses[expert] += 1
        if expert in self._privileged:
            self._privileged.move_to_end(expert)
        elif self._uses[expert] == 1:
            self._unprivileged.put(expert, 1.0)
        else:
            self._unprivileged.drop(expert)
            self._privileged[expert] = None
            if len(self._privileged) > _PRIVILEGED_SHARE * len(self):
                oldest, _ = self._privileged.popitem(last=False)
                self._unprivileged.put(oldest, float(self._uses[oldest]))

    def _leave(self, expert: int, mark: None) -> None:
        del mark
        del self._uses[expert]
        if expert in self._privileged:
            del self._privileged[expert]
        else:
            self._unprivileged.drop(expert)
