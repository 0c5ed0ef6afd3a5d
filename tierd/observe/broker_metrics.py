"""The broker's part of the metrics: requests, answers, evictions, waits, warm-up."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from tierd.broker.broker import Broker
from tierd.observe.activity import Activity
from tierd.observe.families import counter, gauge, histogram
from tierd.requests import Phase

__all__ = ["OUTCOMES", "broker_metrics"]

OUTCOMES = ("hits", "misses", "joined", "cancelled", "failed")
"""How a request may end; names of attributes of `PhaseCounts`, and values of the label `outcome`."""

_REQUESTS = counter("tierd_requests", "Experts asked for by nodes.", "phase")
_ANSWERS = counter(
    "tierd_answers",
    "Experts asked for, by how they were come by; with those pending they add up to the requests.",
    "phase",
    "outcome",
)
_PENDING = gauge("tierd_pending_requests", "Experts asked for and not yet answered.")
_UNASKED = counter("tierd_unasked_hits", "Of the hits, those that nodes found by themselves, without a message.")
_REPEATED = counter(
    "tierd_repeated_requests", "Experts asked for again after a new attach or a torn read; not among the requests."
)
_EVICTIONS = counter("tierd_evictions", "Experts that left RAM, by what their room was wanted for.", "reason")
_REGRETS = histogram(
    "tierd_eviction_regret_seconds", "From an expert leaving RAM to a node asking for it again; short gaps are regrets."
)
_QUEUED = gauge("tierd_queued_acquires", "Layers that wait for room in the arena.")
_READING = gauge("tierd_reads_running", "Experts being read for the arena.")
_HELD = counter("tierd_held_reads", "Reads that waited since their node had as many bytes at the drives as it may.")
_EXPERT_WAIT = histogram(
    "tierd_expert_wait_seconds",
    "From an expert being asked for to it being readable, by how it was come by.",
    "outcome",
)
_LAYER_WAIT = histogram(
    "tierd_layer_wait_seconds", "From a layer's experts being asked for to the last of them being decided.", "phase"
)
_WARM_LEFT = gauge("tierd_warm_left", "Experts that the warm start still wants to read.")
_WARM_READS = counter("tierd_warm_reads", "Experts read for the warm start or for pins, while nobody waited.")
_WARM_FAILURES = counter("tierd_warm_failures", "Such reads that failed.")


def broker_metrics(broker: Broker, activity: Activity) -> Iterator[Metric]:
    """One pass over the broker's counters."""
    stats = broker.stats
    yield _REQUESTS.of(((phase.value,), stats.phases[phase].requests) for phase in Phase)
    yield _ANSWERS.of(
        ((phase.value, outcome), getattr(stats.phases[phase], outcome)) for phase in Phase for outcome in OUTCOMES
    )
    yield _PENDING.one(broker.pending())
    yield _UNASKED.one(stats.unasked)
    yield _REPEATED.one(stats.repeated)
    yield _EVICTIONS.of(((reason.value,), count) for reason, count in stats.evicted.items())
    yield _REGRETS.spread([((), activity.regrets)])
    yield _QUEUED.one(broker.queued)
    yield _READING.one(broker.reading)
    yield _HELD.one(broker.fair.held)
    yield _EXPERT_WAIT.spread(((outcome.value,), found) for outcome, found in activity.expert_waits.items())
    yield _LAYER_WAIT.spread(((phase.value,), found) for phase, found in activity.layer_waits.items())
    yield _WARM_LEFT.one(len(broker.background))
    yield _WARM_READS.one(broker.background.landed)
    yield _WARM_FAILURES.one(broker.background.failed)
