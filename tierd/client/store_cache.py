"""What a far node has once fetched of a store, kept on its own disk: by fingerprint, bounded, checked at every read."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["StoreCache"]

_ALIGNMENT = 64


class StoreCache:
    """Text files and dense tensors of stores, one folder for each fingerprint, one file for each checksum.

    It is a convenience and never a condition: what cannot be read is fetched again, and what cannot be written, since
    the disk is full or read-only, is not kept. Files appear whole; the reader checks their content. When there is too
    much, the folder that was used the longest ago goes.

    Args:
        directory: where the folders lie; made when something is kept.
        limit: most bytes of all folders.
        fingerprint: of the store, 64 hex digits.
    """

    def __init__(self, directory: Path, limit: int, fingerprint: str) -> None:
        self._directory = directory
        self._limit = limit
        self._folder = directory / fingerprint
        with contextlib.suppress(OSError):
            os.utime(self._folder)
        self._others = _size_of(directory) - _size_of(self._folder)
        self._own = _size_of(self._folder)

    def read(self, checksum: str, nbytes: int) -> NDArray[np.uint8] | None:
        """The bytes kept under a checksum, uint8 [nbytes] at a border of 64; None if they are not there.

        The caller compares them with the checksum, and fetches them again if they do not match.
        """
        aligned = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -aligned.ctypes.data % _ALIGNMENT
        into = aligned[start : start + nbytes]
        try:
            with (self._folder / checksum).open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != nbytes:
                    return None
                view, done = into.data, 0
                while done < nbytes:
                    count = file.readinto(view[done:])
                    if not count:
                        return None
                    done += count
        except OSError:
            return None
        return into

    def keep(self, checksum: str, data: bytes | NDArray[np.uint8]) -> None:
        """Keep bytes that have been checked."""
        nbytes = len(data)
        if self._own + nbytes > self._limit:
            return
        while self._others and self._own + self._others + nbytes > self._limit:
            self._drop_oldest()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, prefix="fetching-")
        except OSError:
            return
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data.data if isinstance(data, np.ndarray) else data)
            Path(name).rename(self._folder / checksum)
            self._own += nbytes
        except OSError:
            Path(name).unlink(missing_ok=True)

    def _drop_oldest(self) -> None:
        folders = [folder for folder in _folders(self._directory) if folder != self._folder]
        if not folders:
            self._others = 0
            return
        oldest = min(folders, key=_used)
        self._others = max(0, self._others - _size_of(oldest))
        shutil.rmtree(oldest, ignore_errors=True)
        if oldest.exists():  # it cannot be removed, and would be tried for ever
            self._others = 0


def _folders(directory: Path) -> list[Path]:
    try:
        return [entry for entry in directory.iterdir() if entry.is_dir() and not entry.is_symlink()]
    except OSError:
        return []


def _used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _size_of(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for entry in folder.rglob("*"):
            with contextlib.suppress(OSError):
                if entry.is_file() and not entry.is_symlink():
                    total += entry.stat().st_size
    return total
