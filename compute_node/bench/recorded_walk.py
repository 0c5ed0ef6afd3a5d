"""Decodes the tokens of a recorded run again, as often as one likes: the same experts in the same order each time."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from compute_node.bench.memory_bandwidth import memory_bandwidth
from compute_node.engine.language_model import LanguageModel
from compute_node.engine.limit import dense_bytes_of_a_token, expert_bytes_of_a_token
from tierd.client.source import Phase
from tierd.errors import UsageError
from tierd.policy.trace import Trace

__all__ = ["RecordedWalk"]


@dataclass(frozen=True, slots=True)
class _Cost:
    """Seconds of one run's decode steps, and what was found in RAM."""

    seconds: float
    waited: float
    messages: float
    asked: int
    hits: int


class RecordedWalk:
    """The first text of a trace: its prompt, and the tokens that were decoded behind it.

    Args:
        model: to run.
        trace: recorded with it.
        tokens: most tokens to decode.

    Raises:
        UsageError: the trace belongs to another model, or has nothing to decode.
    """

    def __init__(self, model: LanguageModel, trace: Trace, tokens: int) -> None:
        geometry = model.source.store.manifest.geometry
        if trace.layer_experts != tuple(entry.experts for entry in geometry.layers):
            raise UsageError(f"{trace.name} was recorded with another model")
        first = trace.sequences == trace.sequences[0] if len(trace) else np.zeros(0, np.bool_)
        text, prompt = trace.tokens[first].tolist(), max(1, int(trace.prefill[first].sum()))
        if text and not 0 <= min(text) <= max(text) < model.config.vocab_size:
            raise UsageError(f"{trace.name} names tokens that this model does not have")
        self._model = model
        self._prompt = text[:prompt]
        self._tokens = text[prompt : min(prompt + tokens, model.context)]
        if not self._tokens:
            raise UsageError(f"{trace.name} has no tokens to decode behind a prompt of {prompt}")

    def measure(self, rounds: int) -> dict[str, Any]:
        """Runs once without counting, then `rounds` times: seconds per token of each, and where they went."""
        model, digest = self._model, ""
        costs = []
        for number in range(rounds + 1):
            cost, digest = self._run()
            if number:
                costs.append(cost)
        count, manifest = len(self._tokens), model.source.store.manifest
        token = dense_bytes_of_a_token(manifest, tied_embeddings=model.config.tied_embeddings)
        token += expert_bytes_of_a_token(manifest.geometry)
        bandwidth = memory_bandwidth(model.threads)
        waited = float(np.median([cost.waited for cost in costs])) / count
        return {
            "seconds_per_token": [cost.seconds / count for cost in costs],
            "compute_seconds": float(np.median([cost.seconds for cost in costs])) / count - waited,
            "wait_seconds": waited,
            "message_seconds": float(np.median([cost.messages for cost in costs])) / count,
            "memory_seconds": 0.0 if bandwidth is None else token / bandwidth,
            "hit_rate": sum(cost.hits for cost in costs) / max(1, sum(cost.asked for cost in costs)),
            "tokens": count,
            "prompt_tokens": len(self._prompt),
            "logits": digest,
            "threads": model.threads,
            "numerics": model.numerics,
        }

    def _run(self) -> tuple[_Cost, str]:
        """One run, and a hash of the logits of all its decode steps."""
        model, stats = self._model, self._model.source.stats
        sequence, digest = model.cache.take(), hashlib.blake2b(digest_size=8)
        try:
            for start in range(0, len(self._prompt), model.rows):
                model.extend(sequence, self._prompt[start : start + model.rows], phase=Phase.PREFILL, logits_of=())
            waits, asked, hits = dict(stats.wait_by_outcome), stats.requested, stats.outcomes["hit"]
            waited, seconds = stats.wait_seconds, 0.0
            for token in self._tokens:
                begun = time.perf_counter()
                logits = model.extend(sequence, [token], phase=Phase.DECODE)
                seconds += time.perf_counter() - begun
                assert logits is not None
                digest.update(logits.tobytes())
        finally:
            model.cache.give_back(sequence)
        cost = _Cost(
            seconds,
            stats.wait_seconds - waited,
            stats.wait_by_outcome["hit"] - waits["hit"],
            stats.requested - asked,
            stats.outcomes["hit"] - hits,
        )
        return cost, digest.hexdigest()
