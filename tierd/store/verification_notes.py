"""What an interrupted verification had found, so that the next run goes on where it stopped."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from tierd.errors import DriveError, StoreDamaged
from tierd.store.checksums import sha256
from tierd.store.pieces import Problem
from tierd.store.reading import read_small_file
from tierd.store.writing import write_atomic

__all__ = ["CheckedShard", "VerificationNotes"]

_VERSION: Final = 1
_MAX_BYTES: Final = 64 << 20


@dataclass(slots=True)
class CheckedShard:
    """One shard that was read to its end."""

    records: int = 0
    tensors: int = 0
    bytes_read: int = 0
    problems: list[Problem] = field(default_factory=list)


class VerificationNotes:
    """Notes of one verification. Notes that cannot be read or written are no reason to stop: all is read then.

    A shard counts as seen only while it is the same file, of the same length and modification time.

    Args:
        path: of the notes; None keeps none.
        fingerprint: of the store.
        shards: what is known by file name: identity of the file, what was found, and when (seconds since 1970).
    """

    def __init__(self, path: Path | None, fingerprint: str, shards: dict[str, dict[str, Any]]) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._shards = shards

    @classmethod
    def open(cls, folder: Path | None, store: Path, fingerprint: str, max_age: float) -> Self:
        """The notes of a store's interrupted verification, or new ones."""
        if folder is None:
            return cls(None, fingerprint, {})
        path = folder / f"verification-{sha256(str(store.resolve()).encode())[:16]}.json"
        try:
            table = json.loads(read_small_file(path, _MAX_BYTES))
            if table["version"] != _VERSION or table["fingerprint"] != fingerprint:
                return cls(path, fingerprint, {})
            since = time.time() - max_age
            shards = {
                file: row
                for file, row in table["shards"].items()
                if row["at"] >= since and isinstance(row["identity"], list) and isinstance(_checked(row), CheckedShard)
            }
        except (StoreDamaged, DriveError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError,
                RecursionError):  # fmt: skip
            shards = {}
        return cls(path, fingerprint, shards)

    def find(self, path: Path) -> CheckedShard | None:
        """What was found in a shard; None if it was not read yet, or has changed since."""
        row = self._shards.get(path.name)
        if row is None or row["identity"] != _identity(path):
            return None
        return _checked(row)

    def add(self, path: Path, checked: CheckedShard) -> None:
        """A shard was read to its end."""
        if self._path is None:
            return
        self._shards[path.name] = {"identity": _identity(path), "at": time.time(), "checked": asdict(checked)}
        table = {"version": _VERSION, "fingerprint": self._fingerprint, "shards": self._shards}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps(table).encode())
        except (DriveError, OSError):
            self._path = None

    def remove(self) -> None:
        """The verification is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _checked(row: dict[str, Any]) -> CheckedShard:
    checked = row["checked"]
    problems = [Problem(**problem) for problem in checked["problems"]]
    return CheckedShard(int(checked["records"]), int(checked["tensors"]), int(checked["bytes_read"]), problems)


def _identity(path: Path) -> list[int]:
    try:
        status = path.stat()
    except OSError:
        return []
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]
