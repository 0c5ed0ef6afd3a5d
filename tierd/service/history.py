"""The usage history on disk: one small file per store, replaced as a whole, never needed.

Whatever is wrong with it, the daemon serves on: a damaged file counts as none, a file of a newer version or of another
store is left alone, and a disk that is full or read-only costs one warning and leaves the old file as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final

import aiofiles
import aiofiles.os
import numpy as np
import structlog
from numpy.typing import NDArray

from tierd.errors import StoreDamaged, UsageError
from tierd.state import state_directory
from tierd.store.checksums import xxh3

__all__ = ["HistoryFile", "history_path"]

_FORMAT: Final = 1
_MAX_BYTES: Final = 256 << 20
_PARTIAL: Final = ".partial"

_log = structlog.get_logger()


def history_path(store: Path, fingerprint: str, directory: Path | None) -> Path:
    """Where the history of a store lies.

    Args:
        store: the store's directory.
        fingerprint: of the store.
        directory: as the operator said; None: beside the store, in STORE.state, where that can be written, else in
            the user's state directory.
    """
    if directory is None:
        beside = store.with_name(f"{store.name}.state")
        writable = os.access(beside if beside.is_dir() else store.parent, os.W_OK | os.X_OK)
        directory = beside if writable else state_directory()
    return directory / f"history-{fingerprint[:16]}.json"


class HistoryFile:
    """Reads and writes the file.

    Args:
        path: of the file.
        fingerprint: of the store.
        experts: of the store.

    Attributes:
        keep: why the file is left as it is, or nothing.
        saved: how often it was written.
    """

    def __init__(self, path: Path, fingerprint: str, experts: int) -> None:
        self.path = path
        self.keep = ""
        self.saved = 0
        self._fingerprint = fingerprint
        self._experts = experts
        self._warned = False

    async def load(self) -> NDArray[np.float64] | None:
        """Decayed uses by flat number, float64 [experts]; None if there is no good file."""
        try:
            async with aiofiles.open(self.path, "rb") as file:
                raw = await file.read(_MAX_BYTES + 1)
            return await asyncio.to_thread(self._parse, raw)
        except FileNotFoundError:
            return None
        except OSError as error:
            why = error.strerror or str(error)
        except StoreDamaged as error:
            why = error.message
        except UsageError as error:
            why = self.keep = error.message
        _log.warning("usage history not used", file=str(self.path), why=why)
        return None

    async def save(self, values: NDArray[np.float64]) -> bool:
        """Replace the file; False if it stays as it was."""
        if self.keep:
            return False
        partial = self.path.with_name(self.path.name + _PARTIAL)
        try:
            await aiofiles.os.makedirs(self.path.parent, exist_ok=True)
            raw = await asyncio.to_thread(self._encode, values)
            async with aiofiles.open(partial, "wb") as file:
                await file.write(raw)
                await file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            await aiofiles.os.replace(partial, self.path)
            await asyncio.to_thread(_sync, self.path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                await aiofiles.os.unlink(partial)
            if not self._warned:
                self._warned = True
                _log.warning(
                    "usage history not saved, the last one stays",
                    file=str(self.path),
                    error=error.strerror,
                    advice="Give a writable --state-dir, or --history read.",
                )
            return False
        self._warned = False
        self.saved += 1
        return True

    def _encode(self, values: NDArray[np.float64]) -> bytes:
        counts = [float(f"{value:.6g}") for value in values]
        table = {
            "format": _FORMAT,
            "fingerprint": self._fingerprint,
            "xxh3": _digest(counts),
            "counts": counts,
        }
        return json.dumps(table).encode()

    def _parse(self, raw: bytes) -> NDArray[np.float64]:
        """The counts in the file.

        Raises:
            StoreDamaged: the file is damaged and worth nothing.
            UsageError: it is somebody else's, and must stay.
        """
        if len(raw) > _MAX_BYTES:
            raise StoreDamaged(f"it is longer than {_MAX_BYTES} bytes")
        try:
            table: Any = json.loads(raw)
            version, fingerprint, counts = table["format"], table["fingerprint"], table["counts"]
            if isinstance(version, int) and version > _FORMAT:
                raise UsageError(f"it has format {version}, newer than {_FORMAT}")
            if fingerprint != self._fingerprint:
                raise UsageError(f"it belongs to another store ({str(fingerprint)[:16]})")
            good = version == _FORMAT and table["xxh3"] == _digest(counts)
            values = np.array(counts, np.float64)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise StoreDamaged("it is damaged") from None
        if not good or values.shape != (self._experts,) or not np.all(np.isfinite(values) & (values >= 0)):
            raise StoreDamaged("it is damaged")
        return values


def _digest(counts: object) -> str:
    return f"{xxh3(json.dumps(counts).encode()):016x}"


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
