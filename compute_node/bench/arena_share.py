"""How much of a daemon's arena a process sees, and how much of that is its share of the one copy (proc(5), smaps)."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["arena_share"]


def arena_share(pid: int) -> dict[str, int]:
    """Bytes of the arena in a process of this user.

    Returns:
        `rss_bytes`: pages that it has mapped and touched. `pss_bytes`: each of them divided by the number of processes
        that have it, so that over all processes they add up to the memory itself.
    """
    sums, inside = {"rss_bytes": 0, "pss_bytes": 0}, False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        if not re.match(r"\w+:", line):
            inside = "tierd-arena" in line
        elif inside and (found := re.match(r"(Rss|Pss):\s+(\d+) kB", line)):
            sums[f"{found[1].lower()}_bytes"] += int(found[2]) << 10
    return sums
