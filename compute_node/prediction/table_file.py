"""Token tables between runs: a file per store in the state directory. Losing it costs speed for a while, no token."""

from __future__ import annotations

import os
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from tierd.errors import UsageError
from tierd.policy.token_table import TokenTable

__all__ = ["TableFile"]

_MOST_BYTES: Final = 256 << 20


class TableFile:
    """The saved token table of one store. Problems never end a run: they are told, once, and the run goes on.

    Args:
        directory: made when something is saved.
        fingerprint: of the store; another model's table is never read.
    """

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self.path = directory / f"tokens-{fingerprint[:32]}.npz"

    def load(self, table: TokenTable) -> str:
        """Fills the table from the file, if there is one; returns what was wrong with it, or nothing."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                if sum(member.file_size for member in archive.infolist()) > _MOST_BYTES:
                    return f"{self.path}: more than {_MOST_BYTES >> 20} MiB of token tables are not read"
            with np.load(self.path, allow_pickle=False) as content:
                table.restore({name: content[name] for name in content.files})
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            return f"{self.path}: the token tables of earlier runs cannot be read: {error}"
        except UsageError as error:
            return f"{self.path}: {error.message}"
        return ""

    def save(self, table: TokenTable) -> str:
        """Replaces the file as a whole; returns why that failed, or nothing. The old file stays until then."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with temporary.open("wb") as file:
                np.savez(file, allow_pickle=False, **table.as_arrays())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return f"{self.path}: token tables cannot be saved: {error.strerror}"
        return ""
