"""How near an answer ran to the machine's limit, in one sentence: the same one in the node's and the daemon's tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def limit_words(tokens_per_second: float, share: float, lost_to: Mapping[str, float], *, waits: str = "") -> str:
    """The sentence for people.

    Args:
        tokens_per_second: the limit, above 0.
        share: of it that was reached; above 1 where weights stayed in the processor's cache.
        lost_to: by name of `LOSSES`, shares of the time; below half a percent they are left out.
        waits: what waiting for experts was, if not for drives.
    """
    limit = f"{tokens_per_second:,.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.2g}"
    if share > 1 + _LEAST_SHARE:
        return (
            f"plain reading, as it was measured, allows {limit} tok/s, and this run was faster ({100 * share:.0f} %): "
            "weights may have stayed in a cache, or the machine was busy when it was measured"
        )
    lost = sorted(((part, name) for name, part in lost_to.items() if part >= _LEAST_SHARE), reverse=True)
    reached, *parts = _percents([share, *(part for part, _ in lost)])
    names = LOSSES | ({"drive_waits": waits} if waits else {})
    told = ", ".join(f"{part} % to {names[name]}" for part, (_, name) in zip(parts, lost, strict=True))
    return f"this run could not be faster than {limit} tok/s: it reached {reached} %" + (
        f", and lost {told}" if told else ""
    )


def _percents(shares: Sequence[float]) -> list[int]:
    """Whole percents whose sum is that of the shares: where rounding lost some, the largest remainders get them."""
    whole = [int(100 * share) for share in shares]
    lacking = round(100 * sum(shares)) - sum(whole)
    nearest = sorted(range(len(shares)), key=lambda place: whole[place] - 100 * shares[place])
    for place in nearest[: max(0, lacking)]:
        whole[place] += 1
    return whole
