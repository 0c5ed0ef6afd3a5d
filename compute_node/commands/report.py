"""What an answer cost, for people and for programs; every figure is the node's own count."""

from __future__ import annotations

from typing import Any, Final

from compute_node.commands.near_limit import speed_limit
from compute_node.commands.opening import Opened, daemon_stats
from compute_node.engine.generate import Finished
from tierd.client.bytes_source import BytesSource
from tierd.client.limit_words import limit_words
from tierd.client.source import ExpertSource, SourceStats
from tierd.client.worker_source import WorkerSource
from tierd.sizes import format_share

__all__ = ["REPORT_INDENT", "AnswerReport"]

REPORT_INDENT: Final = 12
"""Columns before the figures in a report's lines, which are set in by two."""


class AnswerReport:
    """Figures of one answer: the source's counters since `before`, and what the generator measured.

    Args:
        opened: what generated it.
        before: the source's counters when the answer began.
        finished: the generator's last event.
        text: of the answer.
        seed: of its draws.
    """

    def __init__(self, opened: Opened, before: SourceStats, finished: Finished, text: str, *, seed: int) -> None:
        now = opened.source.stats
        self._opened = opened
        self._finished = finished
        self._text = text
        self._seed = seed
        self.outcomes = {name: count - before.outcomes.get(name, 0) for name, count in now.outcomes.items()}
        self.tiers = {name: count - before.tiers.get(name, 0) for name, count in now.tiers.items()}
        self.repeated = now.repeated - before.repeated
        self.messages = now.messages - before.messages
        self.discarded = now.discarded - before.discarded
        daemon = daemon_stats(opened.source)
        self.arena_slots = None if daemon is None else daemon.arena.slots
        self.limit = speed_limit(opened, finished, daemon)

    def as_object(self) -> dict[str, Any]:
        """Everything, for `--json` and for the last line of `--events`."""
        finished, opened, limit = self._finished, self._opened, self.limit
        return {
            "token_ids": list(finished.token_ids),
            "text": self._text,
            "prompt_tokens": finished.prompt_tokens,
            "reused_tokens": finished.reused_tokens,
            "finish_reason": finished.reason.value,
            "tokens_per_second": finished.tokens_per_second,
            "time_to_first_token_seconds": finished.time_to_first_token_seconds,
            "seconds": finished.seconds,
            "decode": {"seconds": finished.decode.seconds, "wait_seconds": finished.decode.wait_seconds},
            "limit_tokens_per_second": None if limit is None else limit.tokens_per_second,
            "limit_share": None if limit is None else limit.share,
            "lost_to": None if limit is None else limit.lost_to,
            "arena_slots": self.arena_slots,
            "unique_experts": finished.experts_chosen,
            "hits": self.outcomes.get("hit", 0),
            "misses": self.outcomes.get("miss", 0),
            "joined": self.outcomes.get("joined", 0),
            "repeated": self.repeated,
            "messages": self.messages,
            "discarded": self.discarded,
            "tiers": self.tiers,
            "wait_seconds": finished.wait_seconds,
            "compute_seconds": finished.compute_seconds,
            "seed": self._seed,
            "numerics": opened.model.numerics,
            "kernel_path": opened.kernel_path,
            "threads": opened.model.threads,
            "fingerprint": opened.source.store.fingerprint,
        }

    def lines(self) -> list[str]:
        """For people: speed, experts, where the time went, and how near to the machine's limit it ran."""
        finished = self._finished
        asked, hits = finished.experts_chosen, self.outcomes.get("hit", 0)
        share = f" ({format_share(hits / asked)})" if asked else ""
        first = finished.time_to_first_token_seconds
        began = "never came" if first is None else f"{1000 * first:.0f} ms"
        rate = finished.tokens_per_second
        speed = f"{rate:,.0f} tok/s" if rate >= 100 else f"{rate:.3g} tok/s" if rate else "one step"
        counted = [
            f"{asked:,} asked",
            f"{hits:,} in RAM{share}",
            f"{self.outcomes.get('miss', 0):,} read",
            f"{self.outcomes.get('joined', 0):,} joined",
        ]
        if self.repeated:
            counted.append(f"{self.repeated:,} fetched again")
        lines = [
            f"{len(finished.token_ids)} tokens · {speed} · first token {began} · {finished.reason.value}",
            f"experts   {'   '.join(counted)}",
            f"waited    {finished.wait_seconds:.2f} s for experts, {finished.compute_seconds:.2f} s computing",
        ]
        if (limit := self.limit) is not None:
            waits = _waits(self._opened.source)
            words = limit_words(limit.tokens_per_second, limit.share, limit.lost_to, waits=waits)
            lines.append(f"limit     {words}")
        return lines


def _waits(source: ExpertSource) -> str:
    """What waiting for experts is called where they do not come from drives of this host."""
    if isinstance(source, WorkerSource):
        return "waiting for workers"
    return "waiting for experts from the daemon's host" if isinstance(source, BytesSource) else ""
