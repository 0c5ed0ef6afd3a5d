"""How many experts one request may name; a layer that wants more is served in waves."""

from __future__ import annotations

__all__ = ["wave_size"]


def wave_size(slots: int, top_k: int) -> int:
    """A whole token's experts at least, where they fit, else half of the arena.

    Half, so that one node's prefill of whole layers does not turn everybody else's experts out with every wave.
    """
    return min(slots, max(top_k, slots // 2))
