"""Belady's rule (IBM Systems Journal 5(2), 1966): who is needed again the furthest ahead leaves first. The bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tierd.errors import UsageError
from tierd.policy.keep_heap import KeepHeap
from tierd.policy.residents import ResidentPolicy

__all__ = ["Belady"]


class Belady(ResidentPolicy[None]):
    """No policy that must take in every expert it misses can have more hits on the trace that this one was shown.

    It needs the future, so only a replay can run it.

    Args:
        future: the experts of each request to come, in order, as flat numbers; distinct within a request.
    """

    name = "belady"

    def __init__(self, future: Iterable[Sequence[int]]) -> None:
        super().__init__()
        self._uses: dict[int, list[int]] = {}
        for position, request in enumerate(future):
            for expert in request:
                self._uses.setdefault(expert, []).append(position)
        for positions in self._uses.values():
            positions.reverse()
        self._heap = KeepHeap()

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The expert whose next use lies the furthest ahead."""
        return self._heap.lowest(evictable)

    def _enter(self, expert: int) -> None:
        self._value_anew(expert)

    def _use(self, expert: int) -> None:
        positions = self._uses.get(expert)
        if not positions:
            raise UsageError(f"expert {expert} is used more often than the trace said")
        positions.pop()
        self._value_anew(expert)

    def _leave(self, expert: int, mark: None) -> None:
        del mark
        self._heap.drop(expert)

    def _value_anew(self, expert: int) -> None:
        positions = self._uses.get(expert)
        self._heap.put(expert, -float(positions[-1]) if positions else float("-inf"))
