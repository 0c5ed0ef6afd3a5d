"""What an answer cost, for people and for programs; every figure is the node's own count."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from compute_node.commands.opening import Opened, arena_slots
from compute_node.engine.generate import Finished
from tierd.client.source import SourceStats

__all__ = ["AnswerReport", "snapshot"]


def snapshot(stats: SourceStats) -> SourceStats:
    """A copy that does not change any more."""
    return deepcopy(stats)


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
        self.arena_slots = arena_slots(opened.source)

    def as_object(self) -> dict[str, Any]:
        """Everything, for `--json` and for the last line of `--events`."""
        finished, opened = self._finished, self._opened
        return {
            "token_ids": list(finished.token_ids),
            "text": self._text,
            "prompt_tokens": finished.prompt_tokens,
            "reused_tokens": finished.reused_tokens,
            "finish_reason": finished.reason.value,
            "tokens_per_second": finished.tokens_per_second,
            "time_to_first_token_seconds": finished.time_to_first_token_seconds,
            "seconds": finished.seconds,
            "decode": {"seconds": finished.decode_seconds, "wait_seconds": finished.decode_wait_seconds},
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
        """For people: speed, experts, and where the time went."""
        finished = self._finished
        asked, hits = finished.experts_chosen, self.outcomes.get("hit", 0)
        share = f" ({100 * hits / asked:.0f} %)" if asked else ""
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
        return [
            f"{len(finished.token_ids)} tokens · {speed} · first token {began} · {finished.reason.value}",
            f"experts   {'   '.join(counted)}",
            f"waited    {finished.wait_seconds:.2f} s for experts, {finished.compute_seconds:.2f} s computing",
        ]
