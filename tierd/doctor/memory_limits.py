"""How much memory this process may still take: what the host has, and every control group above the process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MemoryLimit", "memory_limits"]

_UNLIMITED: Final = 1 << 60
"""Version 1 of control groups writes "none" as a number near 2^63."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One bound.

    Attributes:
        where: what sets it, for people.
        total: bytes in all.
        free: bytes not taken, caches that can be dropped counted as free.
    """

    where: str
    total: int
    free: int


def memory_limits(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[MemoryLimit]:
    """The host's memory first, then the limits of control groups (versions 1 and 2) from the process upwards.

    Args:
        proc: where procfs is mounted.
        cgroups: where control groups are mounted.
    """
    limits = [_host(proc)]
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return limits
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            roots = [cgroups, cgroups / "unified"]
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            roots = [cgroups / "memory"]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for root in roots:
            limits += _upwards(root, path, *names)
    return limits


def _host(proc: Path) -> MemoryLimit:
    amounts: dict[str, int] = {}
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name in {"MemTotal", "MemAvailable"}:
            amounts[name] = int(rest.split()[0]) * 1024
    return MemoryLimit("the host", amounts["MemTotal"], amounts["MemAvailable"])


def _upwards(root: Path, path: str, limit_file: str, usage_file: str, reclaimable: str) -> list[MemoryLimit]:
    found = []
    steps = [step for step in path.split("/") if step and step != ".."]
    # In a container the path may be the host's; what is mounted as the root is the container's own group.
    for depth in range(len(steps), -1, -1):
        group = root.joinpath(*steps[:depth])
        total = _number(group / limit_file)
        used = _number(group / usage_file)
        if total is None or used is None or total >= _UNLIMITED:
            continue
        used -= min(used, _statistic(group / "memory.stat", reclaimable))
        found.append(MemoryLimit(f"control group /{'/'.join(steps[:depth])}", total, max(0, total - used)))
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
