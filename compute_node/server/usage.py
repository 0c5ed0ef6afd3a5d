"""What an answer took, in OpenAI's fields and in our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compute_node.serving.requests import Usage

__all__ = ["timings_of", "usage_of"]


def usage_of(*prompts: Sequence[Usage | None]) -> dict[str, Any]:
    """Tokens of an answer.

    Args:
        prompts: the choices of each prompt; a prompt counts once, however many choices it has.
    """
    known = [[part for part in parts if part is not None] for parts in prompts]
    prompt = sum(parts[0].prompt_tokens for parts in known if parts)
    completion = sum(part.completion_tokens for parts in known for part in parts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(parts[0].cached_tokens for parts in known if parts)},
    }


def timings_of(usage: Usage) -> dict[str, Any]:
    """Speed, and where the time went; a field that OpenAI does not have, and that its clients pass over."""
    first = usage.time_to_first_token_seconds
    decoding = 0.0 if first is None else usage.seconds - first
    rate = (usage.completion_tokens - 1) / decoding if usage.completion_tokens > 1 and decoding > 0 else None
    return {
        "seconds": round(usage.seconds, 6),
        "queue_seconds": round(usage.queue_seconds, 6),
        "time_to_first_token_seconds": None if first is None else round(first, 6),
        "tokens_per_second": None if rate is None else round(rate, 3),
        "experts": dict(usage.experts),
        "wait_seconds": round(usage.wait_seconds, 6),
        "compute_seconds": round(usage.compute_seconds, 6),
    }
