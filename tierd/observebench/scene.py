"""A page without a daemon: experts of any geometry that move and are used as those of a busy model would.

    python -m tierd.observebench.scene LAYERS EXPERTS

prints the page's address and serves until standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierd.addresses import Address
from tierd.observe.expert_view import ExpertSources
from tierd.observe.http import HttpServer, make_app
from tierd.observe.page_stream import PageStream

__all__ = ["main"]

_USED_AT_ONCE: Final = 8
"""Experts of every layer that are used between two looks, as at eight tokens a second."""
_MOVED_AT_ONCE: Final = 2


class _Scene:
    """Experts whose uses follow a skewed law; some leave RAM and others come at every look."""

    def __init__(self, layers: int, experts: int) -> None:
        self._chance = np.random.default_rng(1)
        self._shape = (layers, experts)
        total = layers * experts
        self._present: NDArray[np.bool_] = self._chance.random(total) < 0.25
        self._copies: NDArray[np.uint8] = self._chance.integers(1, 3, total, dtype=np.uint8)
        self._asked: NDArray[np.uint32] = np.zeros(total, dtype=np.uint32)
        self._rates: NDArray[np.float64] = self._chance.pareto(1.5, total)

    @property
    def sources(self) -> ExpertSources:
        """For a view."""
        return ExpertSources(self._look, lambda: self._copies, list, lambda: self._asked, dict, lambda: self._rates)

    def _look(self) -> NDArray[np.bool_]:
        layers, experts = self._shape
        start = np.arange(layers)[:, None] * experts
        used = start + (experts * self._chance.random((layers, _USED_AT_ONCE)) ** 3).astype(np.int64)
        self._asked[used] += np.uint32(1)
        moved = start + self._chance.integers(0, experts, (layers, _MOVED_AT_ONCE))
        self._present[moved] = ~self._present[moved]
        return self._present.copy()

    def live(self) -> dict[str, Any]:
        """Figures for the page, empty where there is no daemon to have any."""
        layers, experts = self._shape
        facts = {"version": "–", "store": "scene", "model": "none", "format": "none", "layers": layers}  # noqa: RUF001
        facts |= {"experts": layers * experts, "top_k": _USED_AT_ONCE, "experts_bytes": 0}
        arena = dict.fromkeys(("bytes", "slots", "slots_ready", "slots_granted", "slot_bytes", "huge_page_bytes"), 0)
        names = ("steps", "requests", "hits", "wait_seconds", "read_bytes", "evictions")
        counters = dict.fromkeys((*names, "prefetch_used", "prefetch_late", "prefetch_wasted"), 0)
        lists: dict[str, Any] = {"drives": [], "sessions": [], "steps": {}}
        return {"time": time.time(), "boot_id": "scene", "facts": facts, "arena": arena, "counters": counters} | lists


async def main(layers: int, experts: int) -> None:
    """Serve until standard input ends."""
    scene = _Scene(layers, experts)
    geometry = [(layer, experts) for layer in range(layers)]
    stream = PageStream(geometry, scene.sources, scene.live, lambda: {"time": []})
    server = HttpServer(make_app(lambda: b"", lambda: (True, ""), stream), Address(host="127.0.0.1", port=0))
    print(server.url, flush=True)
    ended = asyncio.Event()

    def readable() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            ended.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), readable)
    serving = asyncio.ensure_future(server.serve())
    await ended.wait()
    stream.close()
    server.stop()
    await serving


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
