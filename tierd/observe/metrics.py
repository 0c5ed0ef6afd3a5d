"""Prometheus metrics of the daemon, read from the counters at scrape time so that nothing is counted twice.

A room's families stand in a module of its own beside this one; see `tierd.observe.families` for the rules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tierd import __version__
from tierd.arena.arena import Arena
from tierd.broker.broker import Broker
from tierd.observe.activity import Activity
from tierd.observe.broker_metrics import broker_metrics
from tierd.observe.drive_metrics import drive_metrics
from tierd.observe.families import counter, gauge, histogram, info
from tierd.observe.live_series import StepCounter
from tierd.observe.log_limit import LINES
from tierd.observe.memory_metrics import arena_metrics, memory_metrics
from tierd.observe.prefetch_metrics import prefetch_metrics
from tierd.service.drives import Drives
from tierd.service.ram import RamKeeper
from tierd.service.remembering import Remembering

__all__ = ["DaemonMetrics", "Watched"]

_BUILD = info("tierd_build", "Version, store and policy of this daemon.", "version", "fingerprint", "policy")
_START = gauge("tierd_start_time_seconds", "When the daemon started, since the epoch.")
_SESSIONS = gauge("tierd_sessions", "Compute nodes that are connected.")
_OPENED = counter("tierd_sessions_opened", "Compute nodes that were admitted.")
_STEPS = counter(
    "tierd_steps",
    "Steps of attached nodes, seen every 2 s: short runs count less. A decode step makes one token of each sequence.",
)
_LAG = histogram("tierd_loop_lag_seconds", "How late the event loop answers a timer.")
_EVENTS = counter("tierd_recorder_events", "Events that the flight recorder noted.")
_LINES = counter("tierd_log_lines", "Lines of the log, by level.", "level")
_LEFT_OUT = counter("tierd_log_lines_left_out", "Lines that were not written, since they repeated others.")


@dataclass(frozen=True, slots=True)
class Watched:
    """The parts of a daemon whose counters are shown.

    Attributes:
        broker: answers requests.
        arena: holds experts.
        drives: are read.
        ram: sizes the arena.
        remembering: history and pins.
        activity: waits and events.
        sessions: how many nodes are connected, and how many were admitted since the start.
        steps: of all attached nodes.
    """

    broker: Broker
    arena: Arena
    drives: Drives
    ram: RamKeeper
    remembering: Remembering
    activity: Activity
    sessions: Callable[[], tuple[int, int]]
    steps: StepCounter


class DaemonMetrics(Collector):
    """All metrics of one daemon, in a registry of its own."""

    def __init__(self, parts: Watched, *, fingerprint: str, policy: str, drive_tier: str) -> None:
        self.registry = CollectorRegistry()
        self._parts = parts
        self._build = {"version": __version__, "fingerprint": fingerprint[:12], "policy": policy}
        self._drive_tier = drive_tier
        self._started = time.time()
        self.registry.register(self)

    def text(self) -> bytes:
        """The exposition that Prometheus scrapes."""
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        """Registration must not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One pass over the counters."""
        parts = self._parts
        yield _BUILD.facts(self._build)
        yield _START.one(self._started)
        connected, admitted = parts.sessions()
        yield _SESSIONS.one(connected)
        yield _OPENED.one(admitted)
        yield _STEPS.one(parts.steps.total())
        yield _LAG.spread([((), parts.activity.lags)])
        yield _EVENTS.one(parts.activity.recorder.noted)
        yield _LINES.of(((level,), count) for level, count in LINES.written.items())
        yield _LEFT_OUT.one(LINES.left_out)
        yield from broker_metrics(parts.broker, parts.activity)
        yield from prefetch_metrics(parts.broker.ahead)
        yield from arena_metrics(parts.arena)
        yield from memory_metrics(parts.ram, parts.remembering)
        yield from drive_metrics(parts.drives, self._drive_tier, parts.activity.read_queue)
