"""The measurements of `tierd bench drives`, each one paired and alternating."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tierd.drivebench.cold_reads import ColdReads, Usage
from tierd.drivebench.figures import Paired, alternate
from tierd.drivebench.fio import FioJob, fio_path, reserved_huge_pages
from tierd.sizes import format_bytes
from tierd.store.store import ExpertStore
from tierd.store.synthetic import make_store

__all__ = ["SIZES", "Effort", "against_fio", "against_throttle", "several_drives"]

MIB: Final = 1 << 20
SIZES: Final = {"1MiB": MIB, "3MiB": 3 * MIB, "19MiB": 19 * MIB}
"""Record sizes by name: a small MoE's, a medium one's, and one expert of GLM-5.2 in 4 bits."""

_REQUESTS: Final = 12
"""Requests that a store is made for; an arena holds four."""
_THROTTLE: Final = 2e9
_DRIVE: Final = 5e8
"""Bytes per second of each of two drives alike; a third has a tenth."""
_MEMORY: Final = Path("/dev/shm")  # noqa: S108  a directory in memory is wanted, and the files lie in a new folder


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        slices: pairs of slices.
        seconds: of one slice.
        request_bytes: experts of a layer that are asked for together, at most (but `together` at least); a store that
            is made has twelve times as much.
        together: experts that are asked for together at least: a token of GLM-5.2 wants eight of a layer.
        say: takes a line for people.
    """

    slices: int = 20
    seconds: float = 0.5
    request_bytes: int = 64 * MIB
    together: int = 8
    say: Callable[[str], None] = lambda _line: None

    def asked_bytes(self, record_bytes: int) -> int:
        """Bytes of a request for records of that size."""
        return max(self.request_bytes, self.together * record_bytes)


@contextlib.contextmanager
def cold_store(folder: Path, record_bytes: int, request_bytes: int) -> Iterator[ExpertStore]:
    """A store of records full of pattern bytes, one request a layer; gone at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=folder) as path:
        yield make_store(
            Path(path) / "store",
            layers=_REQUESTS,
            experts=max(1, request_bytes // record_bytes),
            top_k=1,
            hidden=64,
            intermediate=32,
            fill="pattern",
            record_bytes=record_bytes,
        )


def against_fio(store: ExpertStore, effort: Effort) -> dict[str, Any] | None:
    """The daemon's bytes per second over fio's; None where fio is missing."""
    program = fio_path()
    if program is None:
        return None
    shard = max(store.shard_paths, key=lambda path: path.stat().st_size)
    block = store.geometry.slot_bytes
    with contextlib.ExitStack() as stack:
        reads = ColdReads(store, request_bytes=effort.asked_bytes(block))
        stack.callback(reads.close)
        depth = reads.depth
        huge = stack.enter_context(reserved_huge_pages((depth + 1) * (block + 2 * MIB)))
        jobs = {False: FioJob(program, shard, block, depth, huge=False)}
        if huge:
            jobs[True] = FioJob(program, shard, block, depth, huge=True)
        tries = {pages: sorted(job.run(effort.seconds) for _ in range(3))[1] for pages, job in jobs.items()}
        best = max(tries, key=lambda pages: tries[pages])
        effort.say(
            f"fio, depth {depth}: {format_bytes(tries[False])}/s with ordinary buffers, "
            + (f"{format_bytes(tries[True])}/s on huge pages" if huge else "huge pages could not be reserved")
        )
        reads.run(effort.seconds)
        reads.usage = Usage()
        paired = alternate(lambda: reads.run(effort.seconds), lambda: jobs[best].run(effort.seconds), effort.slices)
        return paired.to_table("daemon", "fio") | {
            "record_bytes": block,
            "depth": depth,
            "fio_buffers": "huge pages" if best else "ordinary",
            "fio_ordinary_bytes_per_second": tries[False],
            "fio_huge_page_bytes_per_second": tries.get(True),
            **_costs(reads),
        }


def against_throttle(folder: Path, effort: Effort, *, record_bytes: int = 3 * MIB) -> dict[str, Any]:
    """Bytes per second through the daemon over those that a throttle around its drive lets through."""
    place = _MEMORY if _room_in_memory(_REQUESTS * effort.request_bytes) else folder
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(cold_store(place, record_bytes, effort.request_bytes))
        plan = stack.enter_context(_throttles(folder, {"nvme": _THROTTLE}))
        reads = ColdReads(store, "--fault-plan", str(plan), request_bytes=effort.request_bytes)
        stack.callback(reads.close)
        reads.run(effort.seconds)
        reads.usage = Usage()
        measured = tuple(reads.run(effort.seconds) for _ in range(effort.slices))
        paired = Paired(measured, (_THROTTLE,) * len(measured))
        return paired.to_table("daemon", "throttle") | {"files_in": str(place), **_costs(reads)}


def several_drives(folder: Path, effort: Effort, *, record_bytes: int = MIB) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two drives over one, and two with a third that is ten times slower over the two; all of them throttled."""
    request = max(effort.request_bytes // 2, record_bytes)
    place = _MEMORY if _room_in_memory(3 * _REQUESTS * request) else folder
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(cold_store(place, record_bytes, request))
        mirrors = [store.path.with_name(f"mirror{number}") for number in (1, 2)]
        for mirror in mirrors:
            shutil.copytree(store.path, mirror)
        plan = stack.enter_context(_throttles(folder, {"nvme": _DRIVE, "mirror1": _DRIVE, "mirror2": _DRIVE / 10}))
        options = [["--fault-plan", str(plan)]]
        options += [[*options[-1], "--mirror", str(mirrors[0])]]
        options += [[*options[-1], "--mirror", str(mirrors[1])]]
        sides = []
        for option in options:
            side = ColdReads(store, *option, request_bytes=request)
            stack.callback(side.close)
            for _ in range(4):
                side.run(effort.seconds)  # the choice of drives learns from the first reads
            sides.append(side)
        one, two, three = sides

        def run(side: ColdReads) -> Callable[[], float]:
            return lambda: side.run(effort.seconds)

        pair = alternate(run(two), run(one), effort.slices)
        third = alternate(run(three), run(two), effort.slices)
        drives = {drive["name"]: drive["bytes"] for drive in three.stats()["drives"]}
        about = {"files_in": str(place), "drive_bytes_per_second": _DRIVE}
        return (
            pair.to_table("two_drives", "one_drive") | about,
            third.to_table("three_drives", "two_drives") | about | {"bytes_by_drive": drives},
        )


def _costs(reads: ColdReads) -> dict[str, Any]:
    usage, gigabytes = reads.usage, max(reads.usage.nbytes, 1) / 1e9
    return {
        "bytes": usage.nbytes,
        "hits": usage.hits,
        "daemon_cpu_seconds_per_gb": usage.daemon_cpu / gigabytes,
        "client_cpu_seconds_per_gb": usage.client_cpu / gigabytes,
        "arena_bytes": reads.arena["bytes"],
        "arena_huge_page_bytes": reads.arena["huge_page_bytes"],
    }


@contextlib.contextmanager
def _throttles(folder: Path, rates: dict[str, float]) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="throttle-", dir=folder) as file:
        rules = [{"drive": drive, "bytes_per_second": rate} for drive, rate in rates.items()]
        json.dump({"throttle": rules}, file)
        file.flush()
        yield Path(file.name)


def _room_in_memory(nbytes: int) -> bool:
    """Whether files in memory, free of any drive's noise, can be had."""
    return _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 * nbytes
