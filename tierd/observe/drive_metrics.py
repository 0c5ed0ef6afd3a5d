"""The drives' part of the metrics. Labels are the configured names of drives and fixed words, so they are bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from tierd.devices.drive import Drive
from tierd.devices.failure import ERROR_KINDS
from tierd.devices.health import HealthState
from tierd.devices.histogram import Histogram
from tierd.observe.families import counter, gauge, histogram
from tierd.service.drives import Drives

__all__ = ["drive_metrics"]

_LABELS = ("tier", "drive")

_READS = counter("tierd_drive_reads", "Records read well.", *_LABELS)
_BYTES = counter("tierd_drive_read_bytes", "Bytes moved by reads, failed ones included.", *_LABELS)
_CHECKSUMS = counter("tierd_drive_checksum_failures", "Reads whose bytes were not the converted ones.", *_LABELS)
_RETRIES = counter("tierd_drive_retries", "Reads tried again on the same drive.", *_LABELS)
_STALLS = counter("tierd_drive_stalls", "Reads that were not answered in time.", *_LABELS)
_FAILOVERS = counter(
    "tierd_drive_failovers", "Reads that failed or stalled here and went on to another drive.", *_LABELS
)
_ERRORS = counter("tierd_drive_errors", "Reads that failed, by kind.", *_LABELS, "kind")
_HEDGES = counter("tierd_drive_hedges", "Reads begun here because another drive was late.", *_LABELS, "outcome")
_SECONDS = histogram(
    "tierd_drive_read_seconds", "Time inside a read, checksum included, failed reads as well.", *_LABELS
)
_QUEUE = histogram("tierd_drive_queue_seconds", "Time that a read waited for its turn, all drives of a tier.", "tier")
_FLIGHT = gauge("tierd_drive_reads_in_flight", "Reads submitted and not done.", *_LABELS)
_DIRECT = gauge("tierd_drive_direct", "1 if reads bypass the page cache.", *_LABELS)
_UP = gauge("tierd_drive_up", "1 if reads go to the drive as a matter of course.", *_LABELS)
_STATE = gauge("tierd_drives", "Drives of a tier by state.", "tier", "state")
_BANDWIDTH = gauge("tierd_drive_bandwidth_bytes_per_second", "What the drive delivers now.", *_LABELS)
_INJECTED = counter(
    "tierd_faults_injected", "Reads damaged on purpose, by kind; only under a fault plan.", *_LABELS, "kind"
)
_PASSED = counter(
    "tierd_fault_wrapper_bytes", "Bytes that passed through the fault wrapper; only under a fault plan.", *_LABELS
)


def drive_metrics(drives: Drives, tier: str, queue: Histogram) -> Iterator[Metric]:
    """One pass over the members of the replica set.

    Args:
        drives: of the daemon.
        tier: value of the label `tier`.
        queue: waits of reads for their turn, all drives.
    """
    members = drives.replicas.drives
    counts = [((tier, drive.name), drive.device.stats) for drive in members]

    def gauges(value: Callable[[Drive], float]) -> list[tuple[tuple[str, str], float]]:
        return [((tier, drive.name), value(drive)) for drive in members]

    yield _READS.of((labels, stats.reads) for labels, stats in counts)
    yield _BYTES.of((labels, stats.bytes) for labels, stats in counts)
    yield _CHECKSUMS.of((labels, stats.checksum_failures) for labels, stats in counts)
    yield _RETRIES.of((labels, stats.retries) for labels, stats in counts)
    yield _STALLS.of((labels, stats.stalls) for labels, stats in counts)
    yield _FAILOVERS.of((labels, stats.failovers) for labels, stats in counts)
    yield _ERRORS.of(
        ((*labels, kind), stats.errors_by.get(kind, 0)) for labels, stats in counts for kind in ERROR_KINDS
    )
    yield _HEDGES.of(
        ((*labels, outcome), value)
        for labels, stats in counts
        for outcome, value in (("won", stats.hedges_won), ("lost", stats.hedges_lost))
    )
    yield _SECONDS.spread((labels, stats.durations) for labels, stats in counts)
    yield _QUEUE.spread([((tier,), queue)])
    yield _FLIGHT.of((labels, stats.in_flight) for labels, stats in counts)
    yield _DIRECT.of((labels, stats.direct) for labels, stats in counts)
    yield _UP.of(gauges(lambda drive: drive.health.usable))
    states = [drive.health.state for drive in members]
    yield _STATE.of(((tier, state.value), states.count(state)) for state in HealthState)
    yield _BANDWIDTH.of(gauges(lambda drive: drive.speed.bandwidth))
    yield from _fault_metrics(drives, tier)


def _fault_metrics(drives: Drives, tier: str) -> Iterator[Metric]:
    """Without a fault plan the families have no series."""
    wrapped = [(info.name, info.injector) for info in drives.info.values() if info.injector is not None]
    yield _INJECTED.of(
        ((tier, name, kind), count) for name, injector in wrapped for kind, count in sorted(injector.injected.items())
    )
    yield _PASSED.of(((tier, name), injector.bytes) for name, injector in wrapped)
