"""What was learned, between runs: a file per store in the state directory. Losing it costs speed, and no token."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.array_files import read_arrays
from tierd.errors import UsageError

__all__ = ["PREDICTOR", "TOKENS", "Learned", "TableFile"]

_MOST_BYTES: Final = 256 << 20

TOKENS: Final = "tokens"
"""Kind of a file: counts of experts by token."""
PREDICTOR: Final = "predictor"
"""Kind of a file: what `fit-predictor` fitted."""


class Learned(Protocol):
    """What can be kept in such a file."""

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """The content."""

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes the content of `as_arrays`; UsageError if it is none for this model."""


class TableFile:
    """What was learned of one store. Problems never end a run: they are told, once, and the run goes on.

    Args:
        directory: made when something is saved.
        fingerprint: of the store; another model's file is never read.
        kind: `TOKENS` or `PREDICTOR`.
    """

    def __init__(self, directory: Path, fingerprint: str, kind: str = TOKENS) -> None:
        self.path = directory / f"{kind}-{fingerprint[:32]}.npz"

    def load(self, table: Learned) -> str:
        """Fills the table from the file, if there is one; returns what was wrong with it, or nothing."""
        try:
            table.restore(read_arrays(self.path, limit=_MOST_BYTES))
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            return f"{self.path}: what earlier runs learned cannot be read: {error}"
        except UsageError as error:
            return f"{self.path}: {error.message}"
        return ""

    def save(self, table: Learned) -> str:
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
            return f"{self.path}: what was learned cannot be saved: {error.strerror}"
        return ""
