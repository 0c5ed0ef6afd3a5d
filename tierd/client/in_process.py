"""Experts read by the node itself, without a daemon: the reference for "the same tokens, whatever the tier"."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.client.source import DirectAccess, Phase, SourceStats, StoreView, Use
from tierd.errors import LimitExceeded, UsageError
from tierd.policy.lru import Lru
from tierd.sizes import format_bytes
from tierd.store.geometry import Geometry

__all__ = ["InProcess", "RecordStore"]

RAM, DRIVE = "ram", "drive"
_HUGE: Final = 2 << 20
_SLOT_BITS: Final = 24


class RecordStore(StoreView, Protocol):
    """A store whose records can be read one by one, such as `ExpertStore`."""

    @property
    def geometry(self) -> Geometry:
        """Of the experts."""

    def read_record(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """One record, checked: uint8 [record_bytes]."""


class InProcess:
    """An `ExpertSource` over a store: buffered, verified reads into a bounded number of slots of RAM.

    The least recently used record leaves when all slots are taken. Nothing runs in the background: native code that
    reads by `direct` never has its bytes changed under it. Memory is taken as slots are filled, in pages of 2 MiB
    where the system gives them.

    Args:
        store: an open store.
        budget: most bytes of records kept; None keeps all that were read.
        huge_pages: take pages of 2 MiB where the system gives them; without, pages of 4 KiB, for comparisons.

    Raises:
        UsageError: the budget is smaller than the store's largest record.
        LimitExceeded: the system refuses so much address space.
    """

    def __init__(self, store: RecordStore, *, budget: int | None = None, huge_pages: bool = True) -> None:
        geometry = store.geometry
        needed, total = geometry.slot_bytes, geometry.experts_total
        if budget is not None and budget < needed:
            raise UsageError(
                f"a budget of {format_bytes(budget)} holds no expert: one takes {format_bytes(needed)}",
                hint=f"Give --arena at least {needed} bytes.",
            )
        self.store = store
        self.stats = SourceStats()
        self._slots = total if budget is None else min(total, budget // needed)
        self._huge_pages = huge_pages
        self._memory = _reserve(self._slots * needed, huge_pages=huge_pages)
        self._words = np.zeros(total, np.uint64)
        self._uses = np.zeros((2, total), np.uint32)
        self._last_step = np.zeros(total, np.uint32)
        self._step = np.zeros(1, np.uint64)
        self._in_use = np.zeros(total, np.uint8)
        self._seen = np.zeros((2, total), np.uint32)
        self._generation = 0
        self._free = list(range(self._slots - 1, -1, -1))
        self._policy = Lru()
        self._resident_bytes = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of the records kept now; never above the budget."""
        return self._resident_bytes

    @cached_property
    def direct(self) -> DirectAccess:
        """Addresses of the words, slots and counters; they stay."""
        return DirectAccess(
            epoch=1,
            table=self._words.ctypes.data,
            payload=self._memory.ctypes.data,
            slot_bytes=self.store.geometry.slot_bytes,
            entries=len(self._words),
            step=self._step.ctypes.data,
            in_use=self._in_use.ctypes.data,
            last_step=self._last_step.ctypes.data,
            prefill_uses=self._uses[0].ctypes.data,
            decode_uses=self._uses[1].ctypes.data,
        )

    @property
    def step_memory(self) -> None:
        """None: what was used the longest ago leaves here, whatever is expected."""

    def note_direct(self, uses: int, *, layers: int, discarded: int = 0) -> None:
        """See `ExpertSource.note_direct`."""
        stats = self.stats
        stats.visits += layers
        stats.requested += uses
        stats.outcomes["hit"] += uses
        stats.tiers[RAM] = stats.tiers.get(RAM, 0) + uses
        stats.discarded += discarded

    def absent(self, layer: int) -> None:
        """None: nothing is read ahead here."""

    def hint(
        self, layer: int, experts: Sequence[int], probabilities: Sequence[float], *, step: int, lead_seconds: float
    ) -> None:
        """Nothing is read ahead here."""

    def visit(
        self,
        layer: int,
        experts: Sequence[int],
        use: Use,
        *,
        step: int,
        phase: Phase,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Resident experts first, then the others one by one, each read once; see `ExpertSource.visit`.

        Raises:
            LimitExceeded: the store has no such layer or expert.
            DriveError: a record could not be read, or its checksum does not match; there is no second copy here.
        """
        del step, phase, meanwhile  # no time is free: the node reads by itself
        geometry, stats = self.store.geometry, self.stats
        flats = [geometry.flat(layer, expert) for expert in experts]
        missing = [place for place, flat in enumerate(flats) if self._words[flat] == 0]
        hits = len(flats) - len(missing)
        stats.visits += 1
        stats.requested += len(flats)
        for key, outcome, count in ((RAM, "hit", hits), (DRIVE, "miss", len(missing))):
            stats.tiers[key] = stats.tiers.get(key, 0) + count
            stats.outcomes[outcome] += count
        self._learn()
        for expert, flat in zip(experts, flats, strict=True):
            if self._words[flat] != 0:
                self._policy.used(flat)
                use(expert, self._address(flat))
        for place in missing:
            begun = time.perf_counter()
            self._fetch(layer, experts[place], flats[place])
            waited = time.perf_counter() - begun
            stats.wait_seconds += waited
            stats.wait_by_outcome["miss"] += waited
            use(experts[place], self._address(flats[place]))

    def close(self) -> None:
        """Give the records back."""
        self._words[:] = 0
        self._memory = _reserve(self._slots * self.store.geometry.slot_bytes, huge_pages=self._huge_pages)
        self.__dict__.pop("direct", None)
        self._free = list(range(self._slots - 1, -1, -1))
        self._policy = Lru()
        self._resident_bytes = 0

    def _address(self, flat: int) -> int:
        slot = (int(self._words[flat]) & ((1 << _SLOT_BITS) - 1)) - 1
        return int(self._memory.ctypes.data) + slot * self.store.geometry.slot_bytes

    def _learn(self) -> None:
        """Tells the policy what native code used since the last time, in order of (step, expert)."""
        changed = np.flatnonzero((self._uses != self._seen).any(axis=0))
        for flat in changed[np.argsort(self._last_step[changed], kind="stable")].tolist():
            if self._words[flat] != 0:
                self._policy.used(flat)
        self._seen[:, changed] = self._uses[:, changed]

    def _fetch(self, layer: int, expert: int, flat: int) -> None:
        record = self.store.read_record(layer, expert)
        if not self._free:
            victim = self._policy.victim(lambda _: True)
            assert victim is not None
            self._policy.removed(victim)
            self._free.append((int(self._words[victim]) & ((1 << _SLOT_BITS) - 1)) - 1)
            self._words[victim] = 0
            self._resident_bytes -= self.store.geometry.layout(self.store.geometry.locate(victim)[0]).record_bytes
        slot = self._free.pop()
        start = slot * self.store.geometry.slot_bytes
        self._memory[start : start + record.nbytes] = record
        self._generation += 1
        self._words[flat] = self._generation << _SLOT_BITS | (slot + 1)
        self._policy.inserted(flat)
        self._resident_bytes += record.nbytes


def _reserve(nbytes: int, *, huge_pages: bool) -> NDArray[np.uint8]:
    """Address space for so many bytes, from a border of 2 MiB; LimitExceeded if the system refuses."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        memory = mmap.mmap(-1, nbytes + _HUGE, flags=flags)
    except OSError as error:
        raise LimitExceeded(
            f"{format_bytes(nbytes)} of memory for experts are refused: {error.strerror}",
            hint="Give a smaller --arena.",
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    skip = -whole.ctypes.data % _HUGE
    return whole[skip : skip + nbytes]
