"""How many cores this process may use: its affinity, and the quota of the control groups that it lives in."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["default_threads", "quota_cores"]


def _number(path: Path, word: int = 0) -> float | None:
    """One number of a one-line file, or None if it is absent, unreadable or says "max"."""
    try:
        return float(path.read_text(encoding="ascii").split()[word])
    except (OSError, ValueError, IndexError):
        return None


def _quota_at(folder: Path) -> float | None:
    """Cores that one control group grants, by version 2 or version 1 of the interface."""
    quota, period = _number(folder / "cpu.max"), _number(folder / "cpu.max", 1)
    if quota is None:
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and quota > 0 and period is not None and period > 0 else None


def quota_cores(root: Path = Path("/")) -> float | None:
    """The smallest quota, in cores, of this process's control groups and those above them; None without one.

    Args:
        root: where `proc` and `sys` are found.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = ("", "unified") if not controllers else (controllers, "cpu")
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            folder = top / group.lstrip("/")
            for step in (folder, *folder.parents):
                quota = _quota_at(step)
                if quota is not None:
                    found.append(quota)
                if step == top:
                    break
    return min(found, default=None)


def default_threads(root: Path = Path("/")) -> int:
    """Threads for the executor: the cores of the affinity mask, no more than the quota allows, at least one."""
    cores = len(os.sched_getaffinity(0))
    quota = quota_cores(root)
    return max(1, cores if quota is None else min(cores, int(quota)))
