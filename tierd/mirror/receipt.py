"""What a mirror says of itself: whose copy it is, and which files were copied and checked.

`mirror.json` is written when staging is complete. Until then `mirror.staging.json` holds the same for the files that
are through; in the end it is renamed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tierd.errors import StoreDamaged
from tierd.store.reading import read_small_file
from tierd.store.writing import sync_directory, write_atomic

__all__ = ["RECEIPT_FILE", "STAGING_FILE", "Receipt", "read_receipt"]

RECEIPT_FILE: Final = "mirror.json"
STAGING_FILE: Final = "mirror.staging.json"
_VERSION: Final = 1
_MAX_BYTES: Final = 64 << 20


@dataclass(slots=True)
class Receipt:
    """The content of both files.

    Attributes:
        fingerprint: of the store.
        source: directory that was copied.
        files: of each file that is through, its length and modification time (ns), as it lies in the mirror.
        complete: whether all planned files are through.
    """

    fingerprint: str
    source: str
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    complete: bool = False

    def note(self, path: Path) -> None:
        """A file of the mirror is whole, checked and durable."""
        status = path.stat()
        self.files[path.name] = (status.st_size, status.st_mtime_ns)

    def vouches_for(self, path: Path) -> bool:
        """True if the file was copied and has not been written since."""
        try:
            status = path.stat()
        except OSError:
            return False
        return self.files.get(path.name) == (status.st_size, status.st_mtime_ns)

    def save(self, directory: Path) -> None:
        """Writes it under its name; DriveError if the drive is full or fails."""
        table: dict[str, Any] = {
            "version": _VERSION,
            "fingerprint": self.fingerprint,
            "source": self.source,
            "files": {
                name: {"bytes": size, "mtime_ns": modified} for name, (size, modified) in sorted(self.files.items())
            },
        }
        write_atomic(directory / STAGING_FILE, (json.dumps(table, indent=1) + "\n").encode())
        if self.complete:
            (directory / STAGING_FILE).replace(directory / RECEIPT_FILE)
            sync_directory(directory)


def read_receipt(directory: Path) -> Receipt | None:
    """The receipt of a mirror, that of an unfinished staging before a complete one; None if there is neither.

    Raises:
        StoreDamaged: the file is not what `Receipt.save` writes.
        DriveError: it cannot be read.
    """
    for name, complete in ((STAGING_FILE, False), (RECEIPT_FILE, True)):
        path = directory / name
        if not path.exists():
            continue
        try:
            table = json.loads(read_small_file(path, _MAX_BYTES))
            if table["version"] != _VERSION:
                raise StoreDamaged(f"{path}: written by another version of tierd")
            files = {str(file): (int(row["bytes"]), int(row["mtime_ns"])) for file, row in table["files"].items()}
            return Receipt(str(table["fingerprint"]), str(table["source"]), files, complete)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise StoreDamaged(
                f"{path}: not the receipt of a mirror: {str(error)[:200]}",
                hint="Move the file away; `tierd mirror verify` needs none.",
            ) from None
    return None
