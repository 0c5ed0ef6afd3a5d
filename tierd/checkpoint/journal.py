"""The journal of a conversion: what it converts, from what, and which shards are complete.

Two files in the destination. `conversion.json` is written once, as a whole: the identity of source and options,
with the source's headers, so that a conversion can go on after its source shards were freed. `conversion.log` has
one flushed line per finished shard or freed source file; a torn last line is ignored.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from tierd.errors import StoreDamaged, UsageError
from tierd.store.checksums import sha256
from tierd.store.reading import read_small_file
from tierd.store.shards import MAX_HEADER_BYTES, ShardHeader, parse_header
from tierd.store.writing import PARTIAL_SUFFIX, sync_directory, write_atomic

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = [
    "IDENTITY_FILE",
    "LOG_FILE",
    "Identity",
    "Journal",
    "is_leftover",
    "read_identity",
    "read_log",
    "write_identity",
]

IDENTITY_FILE: Final = "conversion.json"
LOG_FILE: Final = "conversion.log"
JOURNAL_VERSION: Final = 1
MAX_JOURNAL_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes two runs the same conversion.

    Attributes:
        options: formats and shard size as they were asked for.
        plan: digest of the planned shards.
        texts: SHA-256 of each small file, config.json among them.
        files: of each source shard its length, modification time (ns) and header.
    """

    options: dict[str, Any]
    plan: str
    texts: dict[str, str]
    files: dict[str, tuple[int, int, ShardHeader]]

    def to_json(self) -> bytes:
        """The content of conversion.json."""
        table = {
            "version": JOURNAL_VERSION,
            "options": self.options,
            "plan": self.plan,
            "texts": self.texts,
            "files": {
                name: {
                    "bytes": size,
                    "mtime_ns": modified,
                    "header": base64.b85encode(zlib.compress(header.raw)).decode(),
                }
                for name, (size, modified, header) in self.files.items()
            },
        }
        return json.dumps(table).encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Identity:
        """Reads it back; StoreDamaged if it is not what `to_json` wrote."""
        try:
            table = json.loads(data)
            if table["version"] != JOURNAL_VERSION:
                raise UsageError(
                    f"{where}: written by another version of tierd",
                    hint="Remove the directory and convert again.",
                )
            files = {
                name: (row["bytes"], row["mtime_ns"], _header(row["header"], row["bytes"], f"{where}: {name}"))
                for name, row in table["files"].items()
            }
            return cls(dict(table["options"]), str(table["plan"]), dict(table["texts"]), files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as error:
            raise StoreDamaged(
                f"{where}: the journal of the conversion cannot be read: {str(error)[:200]}",
                hint="Remove the directory and convert again.",
            ) from None


def _header(text: str, size: int, where: str) -> ShardHeader:
    unpacker = zlib.decompressobj()
    raw = unpacker.decompress(base64.b85decode(text), MAX_HEADER_BYTES + 8)
    return parse_header(raw, size, where)


@dataclass(slots=True)
class Journal:
    """An open, locked journal.

    Attributes:
        folder: the destination.
        finished: record or tensor checksums of each complete shard, by file name.
        consumed: names of source shards that were freed.
    """

    folder: Path
    finished: dict[str, list[int]] = field(default_factory=dict)
    consumed: set[str] = field(default_factory=set)
    _fd: int = -1

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Opens or makes the log and locks it.

        Raises:
            UsageError: another conversion into this directory is running.
        """
        journal = cls(folder)
        journal._fd = os.open(folder / LOG_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(journal._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(journal._fd)
            raise UsageError(f"{folder}: another conversion into this directory is running") from None
        journal._replay()
        return journal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def finish_shard(self, file: str, checksums: list[int]) -> None:
        """Notes that a shard is complete, verified and durable."""
        self._append({"shard": file, "xxh3": [f"{value:016x}" for value in checksums]})
        self.finished[file] = checksums

    def note_consumed(self, file: str) -> None:
        """Notes that a source shard is about to be freed; comes before the freeing."""
        self._append({"consumed": file})
        self.consumed.add(file)

    def remove(self) -> None:
        """Removes both files: the conversion is complete."""
        for name in (IDENTITY_FILE, LOG_FILE):
            (self.folder / name).unlink(missing_ok=True)
        sync_directory(self.folder)

    def _append(self, row: dict[str, Any]) -> None:
        text = json.dumps(row)
        os.write(self._fd, f"{sha256(text.encode())[:16]} {text}\n".encode())
        os.fsync(self._fd)

    def _replay(self) -> None:
        self.finished, self.consumed, good = read_log(self.folder)
        os.ftruncate(self._fd, good)
        os.lseek(self._fd, good, os.SEEK_SET)


def read_log(folder: Path) -> tuple[dict[str, list[int]], set[str], int]:
    """Finished shards with their checksums, freed source files, and the length of the intact part of the log."""
    path = folder / LOG_FILE
    data = read_small_file(path, MAX_JOURNAL_BYTES) if path.exists() else b""
    finished: dict[str, list[int]] = {}
    consumed: set[str] = set()
    good = 0
    for line in data.splitlines(keepends=True):
        digest, _, text = line.partition(b" ")
        if not line.endswith(b"\n") or sha256(text[:-1])[:16].encode() != digest:
            break
        row = json.loads(text)
        if "shard" in row:
            finished[row["shard"]] = [int(value, 16) for value in row["xxh3"]]
        else:
            consumed.add(row["consumed"])
        good += len(line)
    return finished, consumed, good


def read_identity(folder: Path) -> Identity | None:
    """The identity of the conversion in a directory, None if there is none."""
    path = folder / IDENTITY_FILE
    if not path.exists():
        return None
    return Identity.from_json(read_small_file(path, MAX_JOURNAL_BYTES), str(path))


def write_identity(folder: Path, identity: Identity) -> None:
    """Starts a conversion."""
    write_atomic(folder / IDENTITY_FILE, identity.to_json())


def is_leftover(name: str) -> bool:
    """True for files that may lie in a destination before its identity was written."""
    return name in {LOG_FILE, IDENTITY_FILE + PARTIAL_SUFFIX}
