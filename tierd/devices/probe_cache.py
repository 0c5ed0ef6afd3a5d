"""Probe results, remembered while drive, files and store stay the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from tierd.devices.probe import DriveProbe
from tierd.errors import DriveError
from tierd.state import state_directory
from tierd.store.checksums import sha256
from tierd.store.writing import write_atomic

__all__ = ["ProbeCache", "probe_key"]

_VERSION: Final = 5
_MAX_RESULTS: Final = 256

_log = structlog.get_logger(__name__)


class ProbeCache:
    """One small file per drive and store.

    Nothing depends on it: what cannot be read is measured again, what cannot be written is not remembered.

    Args:
        directory: where the files lie; made when needed.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory if directory is not None else state_directory() / "probes"

    def load(self, key: str) -> DriveProbe | None:
        """The remembered result, if it is whole and sensible."""
        try:
            row = json.loads((self._directory / f"{key}.json").read_bytes())
            bandwidth, depth, how = float(row["bandwidth"]), int(row["depth"]), str(row["how"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        if row.get("version") != _VERSION or not 1e3 < bandwidth < 1e12 or not 1 <= depth <= 64:
            return None
        return DriveProbe(bandwidth, depth, how[:200])

    def save(self, key: str, probe: DriveProbe) -> None:
        """Remember a result that is worth it."""
        if probe.bandwidth is None:
            return
        row = {"version": _VERSION, "bandwidth": probe.bandwidth, "depth": probe.depth, "how": probe.how}
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomic(self._directory / f"{key}.json", json.dumps(row).encode())
            self._forget_oldest()
        except (OSError, DriveError) as error:
            _log.debug("probe result not remembered", error=str(error))

    def _forget_oldest(self) -> None:
        files = sorted(self._directory.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-_MAX_RESULTS]:
            file.unlink(missing_ok=True)


def probe_key(paths: Sequence[Path], fingerprint: str, record_bytes: int) -> str:
    """Changes when the drive, a file, the store or the size of reads changes; the files' names do not matter.

    Raises:
        OSError: a file is not there.
    """
    facts: list[object] = [_VERSION, fingerprint, record_bytes]
    for path in paths:
        status = path.stat()
        facts.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return sha256(json.dumps(facts).encode())[:40]
