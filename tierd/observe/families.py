"""Metric families: declared once with name, kind, labels and meaning, filled at scrape time from the counters.

Names follow https://prometheus.io/docs/practices/naming/: base units, `_total` on counters, no ratios. No label ever
holds an expert, a client's address or anything else without a bound. The reference table is made of these declarations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from tierd.devices.histogram import Histogram

__all__ = ["WAIT_SECONDS", "Family", "Kind", "counter", "gauge", "histogram", "info", "reference_table"]

WAIT_SECONDS: Final = (
    25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of buckets for waits: a grant without a read, to a deadline."""


class Kind(Enum):
    """Type of a family, as the exposition names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    Attributes:
        name: without the `_total` of a counter or the `_info` of an info.
        kind: its type.
        text: what it tells, one sentence.
        labels: label names; every value comes from a fixed set or from the configuration.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()

    @property
    def wire_name(self) -> str:
        """As Prometheus stores it; a histogram's series carry `_bucket`, `_sum` or `_count` besides."""
        return self.name + {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(self.kind, "")

    def one(self, value: float) -> Metric:
        """The family with its only series."""
        return self.of([((), value)])

    def of(self, rows: Iterable[tuple[Sequence[str], float]]) -> Metric:
        """The family of a counter or gauge, from rows of label values and value."""
        kind = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(self.name, self.text, labels=self.labels)
        for values, value in rows:
            family.add_metric(values, value)
        return family

    def spread(self, rows: Iterable[tuple[Sequence[str], Histogram]]) -> Metric:
        """The family of a histogram, from rows of label values and histogram."""
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        for values, found in rows:
            family.add_metric(values, found.cumulative(), found.total)
        return family

    def facts(self, values: dict[str, str]) -> Metric:
        """The family of an info: facts as labels, value 1."""
        return InfoMetricFamily(self.name, self.text, values)


_ALL: list[Family] = []


def _declare(name: str, kind: Kind, text: str, labels: tuple[str, ...]) -> Family:
    family = Family(name, kind, text, labels)
    _ALL.append(family)
    return family


def counter(name: str, text: str, *labels: str) -> Family:
    """Declare a counter; it only rises."""
    return _declare(name, Kind.COUNTER, text, labels)


def gauge(name: str, text: str, *labels: str) -> Family:
    """Declare a gauge."""
    return _declare(name, Kind.GAUGE, text, labels)


def histogram(name: str, text: str, *labels: str) -> Family:
    """Declare a histogram."""
    return _declare(name, Kind.HISTOGRAM, text, labels)


def info(name: str, text: str, *labels: str) -> Family:
    """Declare an info."""
    return _declare(name, Kind.INFO, text, labels)


def reference_table(families: Iterable[Family] | None = None) -> str:
    """The metrics as a Markdown table, sorted by name; all that were declared, unless some are given."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in sorted(_ALL if families is None else families, key=lambda f: f.name):
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.wire_name}` | {family.kind.value} | {labels} | {family.text} |")
    return "\n".join(rows) + "\n"
