"""Segmented LRU (Karedla, Love and Wherry, IEEE Computer 27(3), 1994): one use is not yet a habit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tierd.policy.residents import ResidentPolicy, first_evictable

__all__ = ["Slru"]

_PROTECTED_SHARE: Final = 0.8


@dataclass(slots=True)
class _Mark:
    used: bool = False


class Slru(ResidentPolicy[_Mark]):
    """A probationary and a protected LRU queue. A second use moves an expert to the protected one.

    When the protected queue holds more than four fifths of all experts, its oldest one goes back on probation. The
    probationary queue's oldest leaves first. Constant time, plus one step per expert that a victim skips.
    """

    name = "slru"

    def __init__(self) -> None:
        super().__init__()
        self._probationary: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The oldest on probation, else the oldest protected one."""
        found = first_evictable(self._probationary, evictable)
        return found if found is not None else first_evictable(self._protected, evictable)

    def _enter(self, expert: int) -> _Mark:
        self._probationary[expert] = None
        return _Mark()

    def _use(self, expert: int) -> None:
        mark = self._resident[expert]
        if expert in self._protected:
            self._protected.move_to_end(expert)
        elif not mark.used:  # the use that it was read for
            mark.used = True
            self._probationary.move_to_end(expert)
        else:
            del self._probationary[expert]
            self._protected[expert] = None
            if len(self._protected) > _PROTECTED_SHARE * len(self):
                self._probationary[self._protected.popitem(last=False)[0]] = None

    def _leave(self, expert: int, mark: _Mark) -> None:
        del mark
        (self._protected if expert in self._protected else self._probationary).pop(expert)
