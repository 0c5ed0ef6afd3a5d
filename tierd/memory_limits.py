"""How much memory there is: the host's, and what the control groups of this process allow, all the way up.

A process in a container sees the host's memory in /proc/meminfo and is killed at its group's limit; systemd's
`MemoryMax=` is such a limit too. Everything here is read from a handful of small files, by way of a function that
tests replace (cgroups(7); kernel documentation, admin-guide/cgroup-v2 and admin-guide/cgroup-v1/memory).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierd.errors import ArenaError

__all__ = ["GroupLimit", "HostMemory", "ReadText", "group_limits", "host_memory", "private_bytes", "read_text"]

ReadText = Callable[[str], str | None]
"""Gives the text of a file, or None where it cannot be read."""

_NO_LIMIT: Final = 1 << 60
"""The kernel writes huge numbers for "no limit" (version 1), and nobody has an exbibyte."""
_DEEPEST: Final = 64
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of the host: all, and what new work could have without swapping."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """A control group that bounds this process.

    Attributes:
        source: the file that says so.
        limit: bytes that all processes in the group may have together.
        used: bytes that others in it have now; page cache, which would go when needed, is left out.
    """

    source: str
    limit: int
    used: int


def read_text(path: str) -> str | None:
    """The text of a small file; None if it is not there, not readable or no text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def host_memory(read: ReadText = read_text) -> HostMemory:
    """What /proc/meminfo says.

    Raises:
        ArenaError: it says nothing.
    """
    table = _table(read("/proc/meminfo"), unit=1024)
    total = table.get("MemTotal:", 0)
    available = table.get("MemAvailable:", table.get("MemFree:", 0))
    if not total:
        raise ArenaError(
            "/proc/meminfo does not say how much memory there is", hint="Give --ram or --arena as an amount."
        )
    return HostMemory(total, min(available, total))


def private_bytes(read: ReadText = read_text) -> int:
    """Memory that belongs to this process alone; pages of files and shared memory are not in it."""
    return _table(read("/proc/self/status"), unit=1024).get("RssAnon:", 0)


def group_limits(read: ReadText = read_text) -> list[GroupLimit]:
    """Every limit on this process's memory, innermost group first; empty where nothing limits it."""
    mounts = list(_mounts(read("/proc/self/mountinfo") or ""))
    own = private_bytes(read)
    found: list[GroupLimit] = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            unified = True
        elif "memory" in controllers.split(","):
            unified = False
        else:
            continue
        for root, top, is_unified in mounts:
            if is_unified is unified:
                for folder in _folders(top, _below(path, root)):
                    found += _version_2(read, folder, own) if unified else _version_1(read, folder, own)
    return found


def _version_2(read: ReadText, folder: str, own: int) -> Iterator[GroupLimit]:
    # Above memory.high the kernel slows the group down and takes its pages: a cache has no use for those either.
    for name in ("memory.max", "memory.high"):
        limit = _amount(read(f"{folder}/{name}"))
        if limit is not None:
            stat = _table(read(f"{folder}/memory.stat"))
            cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
            yield GroupLimit(f"{folder}/{name}", limit, _others(read(f"{folder}/memory.current"), cache, own))


def _version_1(read: ReadText, folder: str, own: int) -> Iterator[GroupLimit]:
    name = f"{folder}/memory.limit_in_bytes"
    stat = _table(read(f"{folder}/memory.stat"))
    # The second one counts groups above the mount, which a container cannot see.
    limits = [_amount(read(name)), _amount(str(stat.get("hierarchical_memory_limit", "")))]
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is not None:
        cache = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
        yield GroupLimit(name, limit, _others(read(f"{folder}/memory.usage_in_bytes"), cache, own))


def _others(usage: str | None, cache: int, own: int) -> int:
    used = _amount(usage)
    return max(0, used - cache - own) if used is not None else 0


def _amount(text: str | None) -> int | None:
    """A limit in bytes; None for `max`, for no limit and for what is no number."""
    text = (text or "").strip()
    if not (text.isascii() and text.isdigit()) or len(text) > 20:
        return None
    amount = int(text)
    return amount if amount < _NO_LIMIT else None


def _table(text: str | None, *, unit: int = 1) -> dict[str, int]:
    """Lines of a name and a number, such as memory.stat and /proc/meminfo; other lines are left out."""
    found = {}
    for line in (text or "").splitlines():
        name, _, rest = line.partition(" ") if "\t" not in line else line.partition("\t")
        words = rest.split()
        if words and words[0].isascii() and words[0].isdigit() and len(words[0]) <= 20:
            found[name] = int(words[0]) * unit
    return found


def _mounts(mountinfo: str) -> Iterator[tuple[str, str, bool]]:
    """Root, mount point and whether it is the unified hierarchy, of each mount that bounds memory (proc(5))."""
    for line in mountinfo.splitlines():
        fields, separator, after = line.partition(" - ")
        before, kind = fields.split(), after.split()
        if not separator or len(before) < 5 or len(kind) < 3:
            continue
        unified = kind[0] == "cgroup2"
        if unified or (kind[0] == "cgroup" and "memory" in kind[2].split(",")):
            yield _plain(before[3]), _plain(before[4]), unified


def _plain(path: str) -> str:
    """Mountinfo writes blanks and the like as three octal digits."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), path).rstrip("/")


def _below(path: str, root: str) -> list[str]:
    """The group's folders below the mount; none where the path lies outside what is mounted."""
    if root and path != root and not path.startswith(f"{root}/"):
        return []
    names = [name for name in path[len(root) :].split("/") if name]
    return [] if ".." in names else names[:_DEEPEST]


def _folders(top: str, names: list[str]) -> Iterator[str]:
    """From the group itself up to the mount."""
    for depth in range(len(names), -1, -1):
        yield "/".join([top, *names[:depth]])
