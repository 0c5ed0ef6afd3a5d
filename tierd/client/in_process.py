"""Experts read by the node itself, without a daemon: the reference for "the same tokens, whatever the tier"."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.client.slot_cache import SlotCache
from tierd.client.source import DirectAccess, NothingAhead, Phase, SourceStats, StoreView, Use
from tierd.policy.lru import Lru
from tierd.store.geometry import Geometry

__all__ = ["InProcess", "RecordStore"]

RAM, DRIVE = "ram", "drive"


class RecordStore(StoreView, Protocol):
    """A store whose records can be read one by one, such as `ExpertStore`."""

    @property
    def geometry(self) -> Geometry:
        """Of the experts."""

    def read_record(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """One record, checked: uint8 [record_bytes]."""


class InProcess(NothingAhead):
    """An `ExpertSource` over a store: buffered, verified reads into a bounded number of slots of RAM.

    The least recently used record leaves when all slots are taken. Nothing runs in the background: native code that
    reads by `direct` never has its bytes changed under it.

    Args:
        store: an open store.
        budget: most bytes of records kept; None keeps all that were read.
        huge_pages: take pages of 2 MiB where the system gives them; without, pages of 4 KiB, for comparisons.

    Raises:
        UsageError: the budget is smaller than the store's largest record.
        LimitExceeded: the system refuses so much address space.
    """

    def __init__(self, store: RecordStore, *, budget: int | None = None, huge_pages: bool = True) -> None:
        self.store = store
        self.stats = SourceStats(RAM)
        self._budget = budget
        self._huge_pages = huge_pages
        self._cache = self._empty()

    @property
    def resident_bytes(self) -> int:
        """Bytes of the records kept now; never above the budget."""
        return self._cache.resident_bytes

    @property
    def direct(self) -> DirectAccess:
        """Addresses of the words, slots and counters; they stay."""
        return self._cache.direct

    @property
    def step_memory(self) -> None:
        """None: what was used the longest ago leaves here, whatever is expected."""

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
        del meanwhile  # no time is free: the node reads by itself
        geometry, stats, cache = self.store.geometry, self.stats, self._cache
        flats = [geometry.flat(layer, expert) for expert in experts]
        missing = [place for place, flat in enumerate(flats) if flat not in cache]
        hits = len(flats) - len(missing)
        stats.ask(len(flats))
        stats.count(RAM, "hit", hits)
        stats.count(DRIVE, "miss", len(missing))
        cache.visit(layer, step=step, phase=phase)
        for expert, flat in zip(experts, flats, strict=True):
            if flat in cache:
                use(expert, cache.use(flat, step=step))
        for place in missing:
            begun = time.perf_counter()
            cache.put(flats[place], self.store.read_record(layer, experts[place]))
            waited = time.perf_counter() - begun
            stats.wait_seconds += waited
            stats.wait_by_outcome["miss"] += waited
            use(experts[place], cache.use(flats[place], step=step))

    def close(self) -> None:
        """Give the records back."""
        self._cache = self._empty()

    def _empty(self) -> SlotCache:
        return SlotCache(self.store.geometry, budget=self._budget, policy=Lru(), huge_pages=self._huge_pages)
