"""Prefetch's part of the metrics: what became of the experts that nodes hinted at."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from tierd.broker.reading_ahead import ReadingAhead
from tierd.observe.families import counter, gauge
from tierd.prefetch.counts import PrefetchCounts, Tally

__all__ = ["prefetch_metrics"]

_HINTED = counter("tierd_prefetch_hinted", "Experts that nodes' hints named, and those that the daemon guessed.")
_GUESSED = counter("tierd_prefetch_guessed", "Of those, the ones that the daemon guessed for nodes without hints.")
_CUT = counter("tierd_prefetch_cut", "Of those, the ones that made no sense or were too many.")
_KNOWN = counter("tierd_prefetch_known", "Of those, the ones in RAM, on their way or hinted before.")
_ISSUED = counter("tierd_prefetch_issued", "Hinted experts that were taken up.")
_OUTCOMES = counter(
    "tierd_prefetch_outcomes",
    "What became of them: used in time, joined late, wasted, cancelled or dropped; with those pending they add up.",
    "outcome",
)
_ISSUED_BYTES = counter("tierd_prefetch_issued_bytes", "Bytes of the experts that were taken up.")
_BYTES = counter("tierd_prefetch_outcome_bytes", "The same in bytes of their records.", "outcome")
_DROPPED = counter("tierd_prefetch_dropped", "Hinted experts given up by the daemon, by reason.", "reason")
_DROPPED_BYTES = counter("tierd_prefetch_dropped_bytes", "The same in bytes of their records.", "reason")
_PENDING = gauge("tierd_prefetch_pending", "Hinted experts taken up and not decided yet.")
_PENDING_BYTES = gauge("tierd_prefetch_pending_bytes", "The same in bytes of their records.")
_LEVEL = gauge(
    "tierd_prefetch_level",
    "How much is speculated: 0 is off, at 3 an expert is read that is wanted with a probability of 0.1.",
    "kind",
)


def _outcomes(counts: PrefetchCounts) -> Iterator[tuple[str, Tally]]:
    yield from (
        ("used", counts.used),
        ("late", counts.late),
        ("wasted", counts.wasted),
        ("cancelled", counts.cancelled),
    )
    dropped = counts.dropped.values()
    yield "dropped", Tally(sum(t.experts for t in dropped), sum(t.bytes for t in dropped))


def prefetch_metrics(ahead: ReadingAhead) -> Iterator[Metric]:
    """One pass over the counts."""
    counts = ahead.book.counts
    yield _HINTED.one(counts.hinted)
    yield _GUESSED.one(counts.guessed)
    yield _CUT.one(counts.cut)
    yield _KNOWN.one(counts.known)
    yield _ISSUED.one(counts.issued.experts)
    yield _OUTCOMES.of(((name,), tally.experts) for name, tally in _outcomes(counts))
    yield _ISSUED_BYTES.one(counts.issued.bytes)
    yield _BYTES.of(((name,), tally.bytes) for name, tally in _outcomes(counts))
    yield _DROPPED.of(((reason.value,), tally.experts) for reason, tally in counts.dropped.items())
    yield _DROPPED_BYTES.of(((reason.value,), tally.bytes) for reason, tally in counts.dropped.items())
    pending = ahead.book.pending()
    yield _PENDING.one(pending.experts)
    yield _PENDING_BYTES.one(pending.bytes)
    yield _LEVEL.of([(("hints",), ahead.level), (("guesses",), ahead.guess_level)])
