"""Least-Stale (Hoang et al., SpecMD, arXiv 2602.03921): layers are visited in a cycle, so what is behind can leave."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from tierd.policy.residents import ResidentPolicy

__all__ = ["LeastStale"]


class LeastStale(ResidentPolicy[int]):
    """An expert whose layer the step has passed is not wanted before the next step, so it leaves first.

    Among those the one with the oldest use; then those of the layers to come, the furthest layer first. The layer
    is that of the last visit, of whichever session. One LRU queue per layer: constant time per use, and one look at
    each layer per victim, whatever the size of the arena.
    """

    name = "least-stale"

    def __init__(self) -> None:
        super().__init__()
        self._layer = 0
        self._uses = 0
        self._queues: dict[int, OrderedDict[int, int]] = {}  # layer -> expert -> number of its last use

    def visit(self, session: int, step: int, layer: int, *, prefill: bool) -> None:
        """Says where the step is."""
        del session, step, prefill
        self._layer = layer

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The oldest use of the layers behind; else the oldest of the furthest layer ahead; this layer last."""
        behind = [layer for layer in self._queues if layer < self._layer]
        oldest = min((found for layer in behind for found in self._oldest(layer, evictable)), default=None)
        if oldest is not None:
            return oldest[1]
        for layer in sorted((layer for layer in self._queues if layer >= self._layer), reverse=True):
            for _, expert in self._oldest(layer, evictable):
                return expert
        return None

    def _oldest(self, layer: int, evictable: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
        queue = self._queues[layer]
        found = next((expert for expert in queue if evictable(expert)), None)
        if found is not None:
            yield queue[found], found

    def _enter(self, expert: int) -> int:
        self._place(expert, self._layer)
        return self._layer

    def _use(self, expert: int) -> None:
        layer = self._resident[expert]
        self._queues[layer].pop(expert)
        if layer != self._layer:  # it was read ahead, while the step was elsewhere
            self._forget_empty(layer)
            self._resident[expert] = self._layer
        self._place(expert, self._layer)

    def _leave(self, expert: int, mark: int) -> None:
        self._queues[mark].pop(expert)
        self._forget_empty(mark)

    def _place(self, expert: int, layer: int) -> None:
        self._uses += 1
        self._queues.setdefault(layer, OrderedDict())[expert] = self._uses

    def _forget_empty(self, layer: int) -> None:
        if not self._queues[layer]:
            del self._queues[layer]
