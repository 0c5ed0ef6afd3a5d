"""Reading usage counts from a file: a numpy array, or JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from tierd.array_files import read_array
from tierd.errors import UsageError
from tierd.small_files import read_at_most

__all__ = ["read_uses"]

_MAX_BYTES: Final = 256 << 20


def read_uses(path: Path, fingerprint: str) -> np.ndarray:
    """How often each expert was used, by flat number: float64.

    Args:
        path: an `.npy` file with one number for each expert, or a JSON list of them, or a JSON object with such a
            list as `counts` and, if it likes, the `fingerprint` of the store.
        fingerprint: of the store for which it is wanted.

    Raises:
        UsageError: the file cannot be read, is neither, or belongs to another store.
    """
    try:
        data = read_at_most(path, _MAX_BYTES)
        table = read_array(io.BytesIO(data)) if path.suffix == ".npy" else json.loads(data)
        if isinstance(table, dict):
            _check_fingerprint(path, table, fingerprint)
            table = table["counts"]
        uses = np.asarray(table, dtype=np.float64)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as a usage history: {error}") from None
    if uses.ndim != 1:
        raise UsageError(f"{path}: a usage history is one list of counts, not an array of shape {uses.shape}")
    return uses


def _check_fingerprint(path: Path, table: dict[str, Any], fingerprint: str) -> None:
    theirs = table.get("fingerprint")
    if theirs is not None and theirs != fingerprint:
        raise UsageError(
            f"{path}: the usage history of another store ({str(theirs)[:12]}, this one is {fingerprint[:12]})"
        )
