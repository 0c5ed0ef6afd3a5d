"""The drives' part of the metrics. Labels are the configured names of drives and fixed words, so they are bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tierd.devices.drive import Drive
from tierd.devices.failure import ERROR_KINDS
from tierd.service.drives import Drives

__all__ = ["drive_metrics"]

_LABELS = ["tier", "drive"]


def drive_metrics(drives: Drives, tier: str) -> Iterator[Metric]:
    """One pass over the members of the replica set.

    Args:
        drives: of the daemon.
        tier: value of the label `tier`.
    """
    members = drives.replicas.drives
    stats = {drive.name: drive.device.stats for drive in members}

    def counter(name: str, text: str, value: Callable[[str], float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        for member in stats:
            family.add_metric([tier, member], value(member))
        return family

    def gauge(name: str, text: str, value: Callable[[Drive], float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        for member in members:
            family.add_metric([tier, member.name], value(member))
        return family

    yield counter("tierd_drive_reads", "Records read well.", lambda d: stats[d].reads)
    yield counter("tierd_drive_read_bytes", "Bytes moved by reads, failed ones included.", lambda d: stats[d].bytes)
    yield counter(
        "tierd_drive_queue_seconds", "Time that reads waited for their turn.", lambda d: stats[d].queue_seconds
    )
    yield counter(
        "tierd_drive_checksum_failures",
        "Reads whose bytes were not the converted ones.",
        lambda d: stats[d].checksum_failures,
    )
    yield counter("tierd_drive_retries", "Reads tried again on the same drive.", lambda d: stats[d].retries)
    yield counter("tierd_drive_stalls", "Reads that were not answered in time.", lambda d: stats[d].stalls)
    yield counter(
        "tierd_drive_failovers",
        "Reads that failed or stalled here and went on to another drive.",
        lambda d: stats[d].failovers,
    )
    errors = CounterMetricFamily("tierd_drive_errors", "Reads that failed, by kind.", labels=[*_LABELS, "kind"])
    hedges = CounterMetricFamily(
        "tierd_drive_hedges", "Reads begun here because another drive was late.", labels=[*_LABELS, "outcome"]
    )
    seconds = HistogramMetricFamily(
        "tierd_drive_read_seconds", "Time inside a read, checksum included, failed reads as well.", labels=_LABELS
    )
    for name, counted in stats.items():
        for kind in ERROR_KINDS:
            errors.add_metric([tier, name, kind], counted.errors_by.get(kind, 0))
        hedges.add_metric([tier, name, "won"], counted.hedges_won)
        hedges.add_metric([tier, name, "lost"], counted.hedges_lost)
        seconds.add_metric([tier, name], counted.durations.cumulative(), counted.durations.total)
    yield errors
    yield hedges
    yield seconds
    yield gauge("tierd_drive_reads_in_flight", "Reads submitted and not done.", lambda d: d.device.stats.in_flight)
    yield gauge("tierd_drive_direct", "1 if reads bypass the page cache.", lambda d: d.device.stats.direct)
    yield gauge("tierd_drive_up", "1 if reads go to the drive as a matter of course.", lambda d: d.health.usable)
    yield gauge("tierd_drive_bandwidth_bytes_per_second", "What the drive delivers now.", lambda d: d.speed.bandwidth)
    if drives.plan is not None:
        yield from _fault_metrics(drives, tier)


def _fault_metrics(drives: Drives, tier: str) -> Iterator[Metric]:
    """Only while a fault plan is in force."""
    injected = CounterMetricFamily(
        "tierd_faults_injected", "Reads damaged on purpose, by kind.", labels=[*_LABELS, "kind"]
    )
    passed = CounterMetricFamily(
        "tierd_fault_wrapper_bytes", "Bytes that passed through the fault wrapper.", labels=_LABELS
    )
    for info in drives.info.values():
        if info.injector is not None:
            passed.add_metric([tier, info.name], info.injector.bytes)
            for kind, count in sorted(info.injector.injected.items()):
                injected.add_metric([tier, info.name, kind], count)
    yield injected
    yield passed
