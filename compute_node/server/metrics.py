"""The node's metrics, for Prometheus: https://prometheus.io/docs/practices/naming/.

Base units, `_total` on counters, no ratios, and no label that holds a client or anything else without a bound; every
series is there from the start. The reference table of `compute-node metrics --doc` is made of these declarations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from compute_node.serving.requests import Done, EngineStats, FinishReason, StepReport

__all__ = ["ENDPOINTS", "NodeMetrics", "reference_table"]

ENDPOINTS: Final = ("chat", "completions", "messages", "tokens", "other")
_CLASSES: Final = ("2xx", "4xx", "5xx")
_LONG: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_SHORT: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_STEPS_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class _Figure:
    """A metric that is read from the engine's counts when somebody asks.

    Attributes:
        name: without the `_total` of a counter.
        text: what it tells.
        values: label value and number; the label value is "" where there is no label.
        label: its only label, or "".
        counts: it only rises.
    """

    name: str
    text: str
    values: Callable[[EngineStats], Iterable[tuple[str, float]]]
    label: str = ""
    counts: bool = False


_FIGURES: Final = (
    _Figure("compute_node_requests_running", "Requests that are computed now.", lambda s: [("", s.running)]),
    _Figure("compute_node_requests_waiting", "Requests in the queue.", lambda s: [("", s.waiting)]),
    _Figure("compute_node_requests_running_limit", "Most requests at once.", lambda s: [("", s.max_running)]),
    _Figure("compute_node_requests_waiting_limit", "Longest queue.", lambda s: [("", s.max_waiting)]),
    _Figure(
        "compute_node_kv_pages",
        "Pages of the KV cache, 64 tokens each: held by requests, keeping a prefix that may be used again, or empty.",
        lambda s: [
            ("held", s.pages - s.free_pages),
            ("prefix", s.cached_pages),
            ("empty", s.free_pages - s.cached_pages),
        ],
        label="state",
    ),
    _Figure(
        "compute_node_requests_accepted",
        "Requests that the engine took; one HTTP request may be several.",
        lambda s: [("", s.requests)],
        counts=True,
    ),
    _Figure(
        "compute_node_requests_refused",
        "Requests sent away because the queue was full.",
        lambda s: [("", s.refused)],
        counts=True,
    ),
    _Figure(
        "compute_node_tokens",
        "Tokens of prompts that were computed, of prompts that were found in the KV cache, and of answers.",
        lambda s: [
            ("prompt_computed", s.prompt_tokens - s.reused_tokens),
            ("prompt_reused", s.reused_tokens),
            ("generated", s.completion_tokens),
        ],
        label="kind",
        counts=True,
    ),
    _Figure(
        "compute_node_experts",
        "Unique experts that the router chose, by the tier that had them: `vram`, memory of the device that computes; "
        "`ram`; or one of the daemon's drives.",
        lambda s: ({"vram": 0, "ram": 0} | dict(s.experts)).items(),
        label="tier",
        counts=True,
    ),
    _Figure(
        "compute_node_preemptions",
        "How often a request gave its pages to an older one, to be computed again.",
        lambda s: [("", s.preempted)],
        counts=True,
    ),
)


class NodeMetrics:
    """All metrics of one node.

    Args:
        facts: of the build and the model, as labels of `compute_node_build_info`.
    """

    def __init__(self, facts: dict[str, str]) -> None:
        # Moments of creation double the series and tell nothing: all are there from the start.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._stats: Callable[[], EngineStats] | None = None
        self._steps: deque[StepReport] = deque()  # that the histograms do not have yet
        build = Info("compute_node_build", "Version, model and machine code.", registry=self.registry)
        build.info(facts)
        http = Counter(
            "compute_node_http_responses",
            "HTTP answers by endpoint and class of status.",
            ("endpoint", "class"),
            registry=self.registry,
        )
        self._http = {(one, kind): http.labels(one, kind) for one in ENDPOINTS for kind in _CLASSES}
        ended = Counter(
            "compute_node_requests_ended", "Requests by how they ended.", ("outcome",), registry=self.registry
        )
        self._ended = {reason: ended.labels(reason.value) for reason in FinishReason}
        self._first = self._histogram(
            "compute_node_time_to_first_token_seconds", "From a request's submission to its first token.", _LONG
        )
        self._each = self._histogram(
            "compute_node_time_per_token_seconds", "Of one answer: its time after the first token, per token.", _SHORT
        )
        self._whole = self._histogram("compute_node_request_seconds", "From a request's submission to its end.", _LONG)
        self._queue = self._histogram("compute_node_queue_seconds", "From a request's submission to its turn.", _LONG)
        step = Histogram(
            "compute_node_step_seconds",
            "Steps of the model: time spent computing, and time spent waiting for experts.",
            ("part",),
            buckets=_SHORT,
            registry=self.registry,
        )
        self._computing, self._waiting = step.labels("compute"), step.labels("expert_wait")
        self._rows = self._histogram("compute_node_step_rows", "Tokens computed in one step.", _ROWS)
        self._together = self._histogram("compute_node_step_requests", "Requests that shared one step.", _ROWS)
        self.registry.register(_EngineFigures(self))

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        """From now on the engine's own counts are shown."""
        self._stats = stats

    def engine_stats(self) -> EngineStats | None:
        """The engine's counts; None before there is one."""
        return None if self._stats is None else self._stats()

    def stepped(self, report: StepReport) -> None:
        """A step was made; from the engine's thread, whose time between two steps is dear: many are counted at once."""
        self._steps.append(report)
        if len(self._steps) >= _STEPS_AT_ONCE:
            self._count_steps()

    def _count_steps(self) -> None:
        """From any thread."""
        while self._steps:
            try:
                report = self._steps.popleft()
            except IndexError:  # another thread was here
                return
            self._computing.observe(max(0.0, report.seconds - report.wait_seconds))
            self._waiting.observe(report.wait_seconds)
            self._rows.observe(report.rows)
            self._together.observe(report.requests)

    def finished(self, done: Done) -> None:
        """A request has ended."""
        usage = done.usage
        self._ended[done.reason].inc()
        self._whole.observe(usage.seconds)
        self._queue.observe(usage.queue_seconds)
        if usage.time_to_first_token_seconds is not None:
            self._first.observe(usage.time_to_first_token_seconds)
            if usage.completion_tokens > 1:
                decoding = usage.seconds - usage.time_to_first_token_seconds
                self._each.observe(decoding / (usage.completion_tokens - 1))

    def answered(self, endpoint: str, status: int) -> None:
        """An HTTP answer was begun; `endpoint` is one of `ENDPOINTS`."""
        kind = "2xx" if status < 400 else "4xx" if status < 500 else "5xx"
        self._http[endpoint, kind].inc()

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        self._count_steps()
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=bounds, registry=self.registry)


class _EngineFigures(Collector):
    """Reads the engine when somebody asks."""

    def __init__(self, metrics: NodeMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """The families without values, for the registry."""
        return [_family(figure) for figure in _FIGURES]

    def collect(self) -> Iterator[Metric]:
        """The families with their values."""
        stats = self._metrics.engine_stats()
        for figure in _FIGURES:
            family = _family(figure)
            if stats is not None:
                for label, value in figure.values(stats):
                    family.add_metric([label] if figure.label else [], value)
            yield family


def _family(figure: _Figure) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if figure.counts else GaugeMetricFamily
    return kind(figure.name, figure.text, labels=[figure.label] if figure.label else [])


def reference_table() -> str:
    """What each metric means, as a Markdown table sorted by name."""
    shown = {figure.name: figure.label for figure in _FIGURES}
    rows = []
    for family in NodeMetrics({"version": ""}).registry.collect():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        if named := shown.get(family.name):
            labels = {named}
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        rows.append((name, family.type, ", ".join(f"`{label}`" for label in sorted(labels)), family.documentation))
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in sorted(rows)]
    return "\n".join(lines) + "\n"
