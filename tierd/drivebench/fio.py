"""The other side: fio reads the same file with the same block size and depth, past the page cache (fio(1))."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierd.errors import DriveError

__all__ = ["FioJob", "fio_path", "reserved_huge_pages"]

_HUGE_PAGE: Final = 2 << 20
_RESERVE: Final = Path("/proc/sys/vm/nr_hugepages")
_PATIENCE_SECONDS: Final = 30.0


def fio_path() -> str | None:
    """The program, None where it is not installed."""
    return shutil.which("fio")


@dataclass(frozen=True, slots=True)
class FioJob:
    """Sequential direct reads of one file by libaio.

    Attributes:
        program: path of fio.
        file: to read.
        block_bytes: of one read.
        depth: reads in flight.
        huge: whether the buffers lie on huge pages, which must be reserved.
    """

    program: str
    file: Path
    block_bytes: int
    depth: int
    huge: bool

    def run(self, seconds: float) -> float:
        """Bytes per second over a slice of so many seconds.

        Raises:
            DriveError: fio failed; says what it said.
        """
        command = [
            self.program,
            "--name=slice",
            f"--filename={self.file}",
            "--rw=read",
            "--readonly",
            "--ioengine=libaio",
            "--direct=1",
            f"--bs={self.block_bytes}",
            f"--iodepth={self.depth}",
            f"--mem={'shmhuge' if self.huge else 'malloc'}",
            "--time_based",
            f"--runtime={int(seconds * 1000)}ms",
            "--output-format=json",
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds + _PATIENCE_SECONDS, cwd="/"
        )
        try:
            (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
            rate = float(job["read"]["bw_bytes"])
        except (ValueError, KeyError):
            rate = 0.0
        if done.returncode or not rate:
            raise DriveError(f"fio: {(done.stderr or done.stdout)[:500].strip()}", path=str(self.file))
        return rate


@contextlib.contextmanager
def reserved_huge_pages(nbytes: int) -> Iterator[bool]:
    """Reserves so much memory in huge pages while the context lasts; False where that cannot be had.

    Only root can; the number is put back at the end.
    """
    needed = -(-nbytes // _HUGE_PAGE)
    try:
        before = int(_RESERVE.read_text(encoding="ascii"))
        _RESERVE.write_text(f"{before + needed}\n", encoding="ascii")
    except (OSError, ValueError):
        yield False
        return
    try:
        yield int(_RESERVE.read_text(encoding="ascii")) >= before + needed
    finally:
        with contextlib.suppress(OSError):
            _RESERVE.write_text(f"{before}\n", encoding="ascii")
