"""The system call that moves a record's bytes, as a value: throttles and fault injectors stand around it.

They work below the checksum, so whatever they do to the bytes meets the same code as a drive that does it by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from tierd.devices.device import RecordRead

__all__ = ["Chain", "Transfer", "TransferWrapper", "system_transfer"]

Transfer: TypeAlias = Callable[[int, list[memoryview], int], int]
"""`os.preadv` or something around it: (descriptor, buffers, offset) to the number of bytes moved; raises OSError."""


class TransferWrapper(Protocol):
    """Something that stands around the transfers of one drive. Used from several threads at once."""

    def wrap(self, read: RecordRead, transfer: Transfer) -> Transfer:
        """The transfer to use for one attempt to read a record; it may be called several times."""

    def close(self) -> None:
        """Let go of transfers that wait in here."""


def system_transfer(fd: int, buffers: list[memoryview], offset: int) -> int:
    """The system call itself."""
    return os.preadv(fd, buffers, offset)


class Chain:
    """Several wrappers as one, the first one innermost."""

    def __init__(self, wrappers: Sequence[TransferWrapper] = ()) -> None:
        self._wrappers = tuple(wrappers)

    def wrap(self, read: RecordRead, transfer: Transfer) -> Transfer:
        """See `TransferWrapper.wrap`."""
        for wrapper in self._wrappers:
            transfer = wrapper.wrap(read, transfer)
        return transfer

    def close(self) -> None:
        """See `TransferWrapper.close`."""
        for wrapper in self._wrappers:
            wrapper.close()
