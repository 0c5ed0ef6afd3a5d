"""How large a KV cache may be."""

from __future__ import annotations

import os
from typing import Final

from compute_node.engine.cache_layout import CacheLayout
from compute_node.kernels.pages import PAGE
from tierd.errors import UsageError
from tierd.memory_limits import group_limits
from tierd.sizes import format_bytes

__all__ = ["memory_of_this_host", "pages_of"]

_SHARE: Final = 4
"""Without a stated budget the cache takes at most RAM divided by this."""


def memory_of_this_host() -> int:
    """Bytes of RAM, or what the control groups around this process allow (containers, systemd) where that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *(group.limit for group in group_limits())])


def pages_of(layout: CacheLayout, *, context: int, sequences: int, budget: int | None) -> int:
    """Pages of a cache.

    Args:
        layout: what the model keeps.
        context: most tokens of a sequence.
        sequences: how many may be open.
        budget: most bytes, recurrent states included; None: as many pages as `sequences` full contexts take, but no
            more than fit a quarter of RAM, and at least one full context.

    Raises:
        UsageError: the budget does not hold one page.
    """
    one = -(-context // PAGE)
    wanted = one * sequences
    page, states = max(1, layout.page_bytes), sequences * layout.sequence_bytes
    if budget is None:
        return max(one, min(wanted, (memory_of_this_host() // _SHARE - states) // page))
    if budget < page + states:
        raise UsageError(
            f"--kv-cache {format_bytes(budget)} holds no page of {PAGE} tokens for {sequences} sequences: "
            f"{format_bytes(page + states)} are needed"
        )
    return min(wanted, (budget - states) // page)
