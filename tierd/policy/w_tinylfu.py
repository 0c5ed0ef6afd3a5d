"""W-TinyLFU (Einziger, Friedman and Manes, arXiv 1512.00727): who stays is decided by a sketch of all past uses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tierd.policy.frequency_sketch import FrequencySketch
from tierd.policy.residents import ResidentPolicy, first_evictable

__all__ = ["WTinyLfu"]

_WINDOW_SHARE: Final = 0.01
_PROTECTED_SHARE: Final = 0.8
_SKETCH_WIDTH: Final = 1 << 15
_SAMPLE_PER_EXPERT: Final = 10


@dataclass(slots=True)
class _Mark:
    used: bool = False


class WTinyLfu(ResidentPolicy[_Mark]):
    """New experts enter a small LRU window; the rest is a segmented LRU, which they must win their way into.

    The oldest of the window and the oldest on probation compete for the place in the main part: the one with fewer
    uses in the sketch leaves, the newcomer on a tie. Until an expert has left there is room, and nobody competes.
    Constant time, plus one step per expert that a victim skips.
    """

    name = "w-tinylfu"

    def __init__(self) -> None:
        super().__init__()
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probationary: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._crowded = False
        self._contest: tuple[int, int] | None = None  # who lost to which newcomer, until one of them leaves
        self._sketch = FrequencySketch(_SKETCH_WIDTH, _SAMPLE_PER_EXPERT * _SKETCH_WIDTH // 16)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The loser of the window's oldest against the oldest on probation; any that may leave where one lacks."""
        newcomer = None
        if len(self._window) > self._window_size() or not (self._probationary or self._protected):
            newcomer = first_evictable(self._window, evictable)
        holder = first_evictable(self._probationary, evictable)
        if holder is None:
            holder = first_evictable(self._protected, evictable)
        if newcomer is None or holder is None:
            found = newcomer if holder is None else holder
            return found if found is not None else first_evictable(self._window, evictable)
        if self._sketch.estimate(newcomer) <= self._sketch.estimate(holder):
            return newcomer
        self._contest = (holder, newcomer)
        return holder

    def _window_size(self) -> float:
        return max(1.0, _WINDOW_SHARE * len(self))

    def _enter(self, expert: int) -> _Mark:
        self._window[expert] = None
        if not self._crowded and len(self._window) > self._window_size():
            self._probationary[self._window.popitem(last=False)[0]] = None
        return _Mark()

    def _use(self, expert: int) -> None:
        self._sketch.add(expert)
        mark = self._resident[expert]
        if expert in self._window:
            self._window.move_to_end(expert)
        elif expert in self._protected:
            self._protected.move_to_end(expert)
        elif not mark.used:
            self._probationary.move_to_end(expert)
        else:
            del self._probationary[expert]
            self._protected[expert] = None
            if len(self._protected) > _PROTECTED_SHARE * len(self):
                self._probationary[self._protected.popitem(last=False)[0]] = None
        mark.used = True

    def _leave(self, expert: int, mark: _Mark) -> None:
        del mark
        self._crowded = True
        for queue in (self._window, self._probationary, self._protected):
            queue.pop(expert, None)
        if self._contest is not None and self._contest[0] == expert and self._contest[1] in self._window:
            newcomer = self._contest[1]
            del self._window[newcomer]
            self._probationary[newcomer] = None
        self._contest = None
