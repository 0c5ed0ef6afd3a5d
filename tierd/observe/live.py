"""What the web page and `tierd top` show: where experts are, figures as of now, and the last ten minutes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tierd import __version__
from tierd.observe.expert_view import ExpertSources
from tierd.observe.live_series import INTERVAL, LiveSeries
from tierd.observe.metrics import Watched
from tierd.observe.page_stream import PageStream
from tierd.requests import Outcome
from tierd.store.store import ExpertStore

__all__ = ["Live", "NodeMemory"]


class NodeMemory(Protocol):
    """What nodes write into shared memory."""

    def uses(self) -> Mapping[int, NDArray[np.uint32]]:
        """Uses without a message, by session: uint32[experts]."""

    def steps(self) -> dict[int, int]:
        """The step of each attached session."""


class Live:
    """Puts the figures together.

    Args:
        store: being served.
        parts: of the daemon.
        nodes: their shared memory.
        statistics: the daemon's counters as plain JSON values.

    Attributes:
        stream: the page's data.
        series: samples of the last ten minutes.
    """

    def __init__(
        self, store: ExpertStore, parts: Watched, nodes: NodeMemory, statistics: Callable[[], dict[str, Any]]
    ) -> None:
        self._parts = parts
        self._statistics = statistics
        self._nodes = nodes
        self._shards: NDArray[np.intp] = np.asarray(store.index["shard"]).astype(np.intp)
        self._shard_count = len(store.shard_paths)
        geometry = store.geometry
        self._facts = {
            "version": __version__,
            "store": store.path.name,
            "model": store.manifest.model_type or "synthetic",
            "format": store.manifest.expert_format,
            "layers": len(geometry.layers),
            "experts": geometry.experts_total,
            "top_k": geometry.top_k,
            "experts_bytes": geometry.expert_bytes,
        }
        sources = ExpertSources(
            present=parts.arena.present,
            copies=self._copies,
            reading=parts.broker.being_read,
            asked=lambda: parts.activity.uses,
            unasked=nodes.uses,
            rates=parts.remembering.rates,
        )
        self.series = LiveSeries(self._counters)
        layers = [(entry.layer, entry.experts) for entry in geometry.layers]
        self.stream = PageStream(layers, sources, self.now, self.series.columns)

    async def watch(self) -> None:
        """Take a sample now and then, until cancelled."""
        while True:
            self.series.take(time.time())
            await asyncio.sleep(INTERVAL)

    def now(self) -> dict[str, Any]:
        """All figures as of now."""
        return self._statistics() | {
            "time": round(time.time(), 3),
            "facts": self._facts,
            "counters": self._counters(),
            "steps": {str(session): step for session, step in self._nodes.steps().items()},
        }

    def _counters(self) -> dict[str, float]:
        """Figures that only rise."""
        broker = self._parts.broker
        counted = broker.stats
        total, prefetch = counted.total(), counted.prefetch
        drives = [drive.device.stats for drive in self._parts.drives.replicas.drives]
        return {
            "steps": self._parts.steps.total(),
            "requests": total.requests,
            "hits": total.hits,
            "misses": total.misses,
            "joined": total.joined,
            "cancelled": total.cancelled,
            "failed": total.failed,
            "wait_seconds": counted.wait_seconds[Outcome.MISS] + counted.wait_seconds[Outcome.JOINED],
            "read_bytes": sum(stats.bytes for stats in drives),
            "evictions": counted.evictions,
            "prefetch_used": prefetch.used.experts,
            "prefetch_late": prefetch.late.experts,
            "prefetch_wasted": prefetch.wasted.experts,
        }

    def _copies(self) -> NDArray[np.uint8]:
        """How many usable drives have each expert: uint8[experts]."""
        by_shard = np.zeros(self._shard_count, dtype=np.uint8)
        for drive in self._parts.drives.replicas.drives:
            if drive.health.usable and not drive.leaving:
                by_shard[list(drive.shards)] += 1
        copies: NDArray[np.uint8] = by_shard[self._shards]
        return copies
