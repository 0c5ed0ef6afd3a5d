"""Checksums: xxh3-64 for the bytes of records and tensors, SHA-256 for files and the fingerprint."""

from __future__ import annotations

import hashlib

import numpy as np
import xxhash

__all__ = ["RunningChecksum", "sha256", "xxh3"]


def xxh3(data: bytes | memoryview | np.ndarray) -> int:
    """The 64-bit xxh3 of contiguous bytes, as an unsigned number."""
    return xxhash.xxh3_64_intdigest(data.data if isinstance(data, np.ndarray) else data)


def sha256(data: bytes | memoryview) -> str:
    """The SHA-256 of contiguous bytes, as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


class RunningChecksum:
    """xxh3-64 of bytes that come piece by piece."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, data: bytes | memoryview | np.ndarray) -> None:
        """Adds contiguous bytes."""
        self._state.update(data.data if isinstance(data, np.ndarray) else data)

    def value(self) -> int:
        """The checksum of all bytes so far."""
        return self._state.intdigest()
