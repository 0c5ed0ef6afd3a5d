"""Prometheus metrics of the daemon, read from the counters at scrape time so that nothing is counted twice.

Names follow https://prometheus.io/docs/practices/naming/: base units, `_total` on counters, no ratios. No label ever
holds an expert, a client's address or anything else without a bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from tierd import __version__
from tierd.arena.arena import Arena
from tierd.broker import Broker
from tierd.observe.drive_metrics import drive_metrics
from tierd.requests import Outcome, Phase
from tierd.service.drives import Drives

__all__ = ["DaemonMetrics"]

_WAIT_BUCKETS = (
    25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


class DaemonMetrics(Collector):
    """All metrics of one daemon, in a registry of its own."""

    def __init__(self, *, fingerprint: str, policy: str, drive_tier: str) -> None:
        self.registry = CollectorRegistry()
        self._fingerprint = fingerprint
        self._policy = policy
        self._drive_tier = drive_tier
        self._started = time.time()
        self._broker: Broker | None = None
        self._arena: Arena | None = None
        self._drives: Drives | None = None
        self._sessions: Callable[[], int] = int
        self._max_lag = 0.0
        wait = Histogram(
            "tierd_expert_wait_seconds",
            "From an expert being asked for to it being readable, by how it was come by.",
            ["outcome"],
            buckets=_WAIT_BUCKETS,
            registry=self.registry,
        )
        self._wait = {outcome: wait.labels(outcome=outcome.value) for outcome in Outcome}
        self.registry.register(self)

    def watch(self, broker: Broker, arena: Arena, drives: Drives, sessions: Callable[[], int]) -> None:
        """The parts whose counters are shown, and how many nodes are connected."""
        self._broker, self._arena, self._drives, self._sessions = broker, arena, drives, sessions

    def waited(self, outcome: Outcome, seconds: float) -> None:
        """An expert became readable for a session."""
        self._wait[outcome].observe(seconds)

    def lagged(self, seconds: float) -> None:
        """The event loop answered a timer this late."""
        self._max_lag = seconds

    def text(self) -> bytes:
        """The exposition that Prometheus scrapes."""
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        """Nothing is known before the daemon runs; registration must not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One pass over the counters."""
        yield InfoMetricFamily(
            "tierd_build",
            "Version, store and policy of this daemon.",
            {"version": __version__, "fingerprint": self._fingerprint[:12], "policy": self._policy},
        )
        yield GaugeMetricFamily("tierd_start_time_seconds", "When the daemon started, since the epoch.", self._started)
        yield GaugeMetricFamily("tierd_sessions", "Compute nodes that are connected.", self._sessions())
        yield GaugeMetricFamily(
            "tierd_event_loop_lag_seconds", "How late the event loop answered its last timer.", self._max_lag
        )
        if self._broker is not None and self._arena is not None and self._drives is not None:
            yield from _broker_metrics(self._broker)
            yield from _arena_metrics(self._arena)
            yield from drive_metrics(self._drives, self._drive_tier)


def _broker_metrics(broker: Broker) -> Iterator[Metric]:
    stats = broker.stats
    asked = CounterMetricFamily("tierd_requests", "Experts asked for by nodes.", labels=["phase"])
    answered = CounterMetricFamily(
        "tierd_answers",
        "Experts asked for, by how they were come by; with those pending they add up to the requests.",
        labels=["phase", "outcome"],
    )
    for phase in Phase:
        counts = stats.phases[phase]
        asked.add_metric([phase.value], counts.requests)
        for outcome in ("hits", "misses", "joined", "cancelled", "failed"):
            answered.add_metric([phase.value, outcome], getattr(counts, outcome))
    yield asked
    yield answered
    yield GaugeMetricFamily("tierd_pending_requests", "Experts asked for and not yet answered.", broker.pending())
    yield CounterMetricFamily(
        "tierd_unasked_hits", "Of the hits, those that nodes found by themselves, without a message.", stats.unasked
    )
    yield CounterMetricFamily(
        "tierd_repeated_requests",
        "Experts asked for again after a new attach or a torn read; not among the requests.",
        stats.repeated,
    )
    yield CounterMetricFamily("tierd_evictions", "Experts that left RAM for another.", stats.evictions)
    yield CounterMetricFamily("tierd_hints_dropped", "Hinted experts not acted on.", stats.hints_dropped)
    yield GaugeMetricFamily("tierd_queued_acquires", "Layers that wait for room in the arena.", broker.queued)


def _arena_metrics(arena: Arena) -> Iterator[Metric]:
    slots = GaugeMetricFamily("tierd_arena_slots", "Slots of the arena by state; they add up to all.", labels=["state"])
    counts = arena.counts()
    slots.add_metric(["free"], counts.free - arena.spares_left)
    slots.add_metric(["spare"], arena.spares_left)
    for state in ("filling", "ready", "retired", "abandoned"):
        slots.add_metric([state], getattr(counts, state))
    yield slots
    yield GaugeMetricFamily("tierd_arena_granted_slots", "Ready slots that a node holds.", counts.granted)
    yield GaugeMetricFamily("tierd_arena_bytes", "Bytes for experts in RAM.", arena.slots * arena.slot_bytes)
    yield GaugeMetricFamily("tierd_arena_huge_page_bytes", "Of the arena, bytes on 2 MiB pages.", arena.huge_page_bytes)
    yield GaugeMetricFamily(
        "tierd_membarrier", "1 where the kernel offers the fence for reads without messages.", float(arena.fenced)
    )
