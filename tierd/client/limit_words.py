"""How near an answer ran to the machine's limit, in one sentence: the same one in the node's and the daemon's tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["LOSSES", "limit_words"]

LOSSES: Final = {
    "drive_waits": "drive waits",
    "messages": "messages",
    "computing": "computing",
    "between_tokens": "the time between tokens",
}
"""What an answer may lose its speed to, and how people read it."""

_LEAST_SHARE: Final = 0.005


def limit_words(tokens_per_second: float, share: float, lost_to: Mapping[str, float]) -> str:
    """The sentence for people.

    Args:
        tokens_per_second: the limit, above 0.
        share: of it that was reached; above 1 where weights stayed in the processor's cache.
        lost_to: by name of `LOSSES`, shares of the time; below half a percent they are left out.
    """
    limit = f"{tokens_per_second:,.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.2g}"
    if share > 1 + _LEAST_SHARE:
        return (
            f"memory allows {limit} tok/s, and this run was faster ({share:.0%}): weights stayed in the processor's "
            "cache"
        )
    lost = sorted(((part, name) for name, part in lost_to.items() if part >= _LEAST_SHARE), reverse=True)
    told = ", ".join(f"{part:.0%} to {LOSSES[name]}" for part, name in lost)
    return f"this run could not be faster than {limit} tok/s: it reached {share:.0%}" + (
        f", and lost {told}" if told else ""
    )
