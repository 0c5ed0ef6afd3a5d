"""The residency table: one aligned 64-bit word per expert, written by the daemon and read by every node.

A word is 0 while the expert is absent, else `generation << 24 | slot + 1`. Slot and generation are one word, so that
they are never seen apart. The generation counts the fillings of a slot: a reader that sees the same word before and
after it computed has computed on the bytes of one filling.

Every access is one aligned 8-byte load or store. CPython's `memoryview` of format `Q` copies an item by a `memcpy` of
the constant size 8, which compilers turn into one move instruction on every 64-bit machine; x86 performs an aligned
8-byte move in one piece (Intel SDM 3A 9.1.1, AMD APM 2 7.3.2).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from tierd.errors import ArenaError, LimitExceeded

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "ABSENT",
    "GENERATIONS",
    "MAX_SLOTS",
    "ResidencyTable",
    "ResidencyView",
    "TableHeader",
    "next_generation",
    "pack",
    "unpack",
]

ABSENT: Final = 0
"""The word of an expert that is not in the arena."""
MAX_SLOTS: Final = (1 << 24) - 1
GENERATIONS: Final = 1 << 40
"""Generations are 1 to GENERATIONS - 1; a slot filled a thousand times a second repeats one after 34 years."""

_SLOT_BITS: Final = 24
_HEADER: Final = struct.Struct("<8s I I 16s Q Q")
_MAGIC: Final = b"TIERDTAB"
_VERSION: Final = 1
_HEADER_BYTES: Final = 4096
_F_SEAL_FUTURE_WRITE: Final = 0x0010


def pack(generation: int, slot: int) -> int:
    """The word of an expert in `slot`, filled for the `generation`-th time."""
    if not 0 <= slot < MAX_SLOTS:
        raise LimitExceeded(f"slot {slot} is outside 0 to {MAX_SLOTS - 1}")
    if not 0 < generation < GENERATIONS:
        raise LimitExceeded(f"generation {generation} is outside 1 to {GENERATIONS - 1}")
    return generation << _SLOT_BITS | slot + 1


def unpack(word: int) -> tuple[int, int]:
    """The generation and the slot of a word that is not `ABSENT`."""
    slot = (word & MAX_SLOTS) - 1
    if slot < 0:
        raise ArenaError(f"residency word {word:#x} names no slot")
    return word >> _SLOT_BITS, slot


def next_generation(generation: int) -> int:
    """The generation after `generation`; it wraps to 1, since 0 is that of a slot never filled."""
    return generation + 1 if generation + 1 < GENERATIONS else 1


@dataclass(frozen=True, slots=True)
class TableHeader:
    """What the table's first page says.

    Attributes:
        boot_id: 16 random bytes of the daemon's start.
        slot_bytes: bytes of one slot of the payload.
        slots: number of slots.
        entries: number of words, one per routed expert of the store.
    """

    boot_id: bytes
    slot_bytes: int
    slots: int
    entries: int

    def to_bytes(self) -> bytes:
        """The header as it lies in shared memory."""
        return _HEADER.pack(_MAGIC, _VERSION, self.slots, self.boot_id, self.slot_bytes, self.entries)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Parse and check a header; ArenaError if it is not one."""
        magic, version, slots, boot_id, slot_bytes, entries = _HEADER.unpack(raw[: _HEADER.size])
        if magic != _MAGIC:
            raise ArenaError("the shared memory handed over is not a residency table")
        if version != _VERSION:
            raise ArenaError(
                f"the residency table has version {version}, this program reads version {_VERSION}",
                hint="Run the same version of tierd on both sides.",
            )
        return cls(boot_id=boot_id, slot_bytes=slot_bytes, slots=slots, entries=entries)


class ResidencyTable:
    """The writer's side. Made by `create`; only the daemon's loop stores."""

    def __init__(self, fd: int, header: TableHeader, mapping: mmap.mmap) -> None:
        self.header = header
        self._map = mapping
        self._words = memoryview(mapping)[_HEADER_BYTES:].cast("Q")
        # A memfd is born 0777 and anyone could open it again for writing through /proc: close that first.
        os.fchmod(fd, 0o400)
        self._reader_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(fd)

    @classmethod
    def create(cls, boot_id: bytes, *, slot_bytes: int, slots: int, entries: int) -> Self:
        """Make a table in which every expert is absent.

        Args:
            boot_id: 16 bytes, random for every start of the daemon.
            slot_bytes: bytes of one slot.
            slots: number of slots, 1 to 2**24 - 1.
            entries: number of experts, at least 1.

        Raises:
            LimitExceeded: a number is outside its limits.
            ArenaError: the kernel gives no shared memory.
        """
        if not 1 <= slots <= MAX_SLOTS:
            raise LimitExceeded(f"a residency table for {slots} slots is outside 1 to {MAX_SLOTS}")
        if entries < 1 or slot_bytes < 1 or len(boot_id) != 16:
            raise LimitExceeded(f"a residency table of {entries} experts with slots of {slot_bytes} bytes is none")
        header = TableHeader(boot_id, slot_bytes, slots, entries)
        nbytes = _HEADER_BYTES + 8 * entries
        try:
            fd = os.memfd_create("tierd-table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(fd, 0, nbytes)
            mapping = mmap.mmap(fd, nbytes)
            # The mapping above stays writable; nobody can make another writable one.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            raise ArenaError(
                f"no shared memory of {nbytes} bytes for the residency table: {error.strerror}",
                hint="Free memory, or raise the memory limit.",
            ) from error
        raw = header.to_bytes()
        mapping[: len(raw)] = raw
        return cls(fd, header, mapping)

    def load(self, expert: int) -> int:
        """The word of `expert`, by one aligned 8-byte load."""
        return self._words[expert]

    def store(self, expert: int, word: int) -> None:
        """Set the word of `expert` by one aligned 8-byte store; fences are the caller's."""
        self._words[expert] = word

    def present(self) -> NDArray[np.bool_]:
        """Which experts have a word now, bool[entries]; a copy."""
        words: NDArray[np.uint64] = np.frombuffer(self._map, np.uint64, self.header.entries, _HEADER_BYTES)
        present: NDArray[np.bool_] = words != ABSENT
        return present

    def reader_fd(self) -> int:
        """A read-only descriptor to hand to nodes; it belongs to the table."""
        return self._reader_fd

    def close(self) -> None:
        """Give back the mapping and the descriptor; nodes keep theirs."""
        if self._reader_fd >= 0:
            os.close(self._reader_fd)
            self._reader_fd = -1
            self._words.release()
            self._map.close()


class ResidencyView:
    """The reader's side: a read-only mapping of the daemon's table.

    Attributes:
        header: what the table's first page says.
        words: uint64[entries], read-only, over the mapping itself.
        address: of the first word, for native readers.
    """

    def __init__(self, header: TableHeader, mapping: mmap.mmap) -> None:
        self.header = header
        self._map = mapping
        self._words = memoryview(mapping)[_HEADER_BYTES:].cast("Q")[: header.entries]
        self.words: NDArray[np.uint64] = np.frombuffer(
            mapping, dtype=np.uint64, count=header.entries, offset=_HEADER_BYTES
        )
        self.address: int = self.words.ctypes.data

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Map a table that the daemon handed over; `fd` stays the caller's.

        Raises:
            ArenaError: it is not a residency table, or is shorter than it says.
        """
        try:
            size = os.fstat(fd).st_size
            if size < _HEADER_BYTES:
                raise ArenaError(f"the residency table handed over has {size} bytes, less than its header")
            mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except OSError as error:
            raise ArenaError(f"the residency table cannot be mapped: {error.strerror}") from error
        header = TableHeader.from_bytes(mapping[: _HEADER.size])
        if size != _HEADER_BYTES + 8 * header.entries or not 1 <= header.slots <= MAX_SLOTS:
            raise ArenaError(f"the residency table says {header.entries} experts but has {size} bytes")
        return cls(header, mapping)

    def load(self, expert: int) -> int:
        """The word of `expert`, by one aligned 8-byte load. x86 loads acquire by themselves."""
        return self._words[expert]

    def unchanged(self, expert: int, word: int) -> bool:
        """Whether `word` still stands, that is, whether what was computed on its slot may be kept.

        Called after the last byte of the slot was used. x86 keeps loads in program order, so a plain load here is
        later than every load of the computation, and no fence is needed; the function call keeps the compiler's
        order. On Arm a load fence (`dmb ishld`) would have to stand before it; Arm was not run.
        """
        return self._words[expert] == word

    def close(self) -> None:
        """Give back the mapping; arrays that are still held keep it alive until they go."""
        self._words.release()
        self.words = np.empty(0, dtype=np.uint64)
        with suppress(BufferError):
            self._map.close()
