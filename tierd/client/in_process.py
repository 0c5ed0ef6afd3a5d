"""Experts read by the node itself, without a daemon: the reference for "the same tokens, whatever the tier"."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tierd.client.source import DirectAccess, Phase, SourceStats, Use
from tierd.errors import UsageError
from tierd.policy.lru import Lru
from tierd.sizes import format_bytes
from tierd.store.store import ExpertStore

__all__ = ["InProcess"]

RAM, DRIVE = "ram", "drive"


class InProcess:
    """An `ExpertSource` over an `ExpertStore`: buffered, verified reads into a bounded number of records kept in RAM.

    The least recently used record leaves when the budget is full. Nothing runs in the background.

    Args:
        store: an open store.
        budget: most bytes of records kept; None keeps all that were read.

    Raises:
        UsageError: the budget is smaller than the store's largest record.
    """

    def __init__(self, store: ExpertStore, *, budget: int | None = None) -> None:
        needed = store.geometry.slot_bytes
        if budget is not None and budget < needed:
            raise UsageError(
                f"a budget of {format_bytes(budget)} holds no expert: one takes {format_bytes(needed)}",
                hint=f"Give --arena at least {needed} bytes.",
            )
        self.store = store
        self.stats = SourceStats()
        self._budget = store.geometry.expert_bytes if budget is None else budget
        self._records: dict[int, np.ndarray] = {}
        self._policy = Lru()
        self._resident_bytes = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of the records kept now; never above the budget."""
        return self._resident_bytes

    @property
    def direct(self) -> DirectAccess | None:
        """None: records lie wherever they were read to, and leave without a word."""
        return None

    def note_direct(self, uses: int, *, layers: int, discarded: int = 0) -> None:
        """Refused: there was nothing to read by."""
        del uses, layers, discarded
        raise UsageError("experts read by the node itself are not read by native code")

    def visit(self, layer: int, experts: Sequence[int], use: Use, *, step: int, phase: Phase) -> None:
        """Resident experts first, then the others one by one, each read once; see `ExpertSource.visit`.

        Raises:
            LimitExceeded: the store has no such layer or expert.
            DriveError: a record could not be read, or its checksum does not match; there is no second copy here.
        """
        del step, phase
        geometry, stats, records = self.store.geometry, self.stats, self._records
        flats = [geometry.flat(layer, expert) for expert in experts]
        missing = [place for place, flat in enumerate(flats) if flat not in records]
        hits = len(flats) - len(missing)
        stats.visits += 1
        stats.requested += len(flats)
        for key, outcome, count in ((RAM, "hit", hits), (DRIVE, "miss", len(missing))):
            stats.tiers[key] = stats.tiers.get(key, 0) + count
            stats.outcomes[outcome] += count
        for expert, flat in zip(experts, flats, strict=True):
            record = records.get(flat)
            if record is not None:
                self._policy.used(flat)
                use(expert, record.ctypes.data)
        for place in missing:
            begun = time.perf_counter()
            record = self._fetch(layer, experts[place], flats[place])
            waited = time.perf_counter() - begun
            stats.wait_seconds += waited
            stats.wait_by_outcome["miss"] += waited
            use(experts[place], record.ctypes.data)

    def close(self) -> None:
        """Give the records back."""
        self._records.clear()
        self._policy = Lru()
        self._resident_bytes = 0

    def _fetch(self, layer: int, expert: int, flat: int) -> np.ndarray:
        nbytes = self.store.location(layer, expert).nbytes
        while self._resident_bytes + nbytes > self._budget:
            victim = self._policy.victim(lambda _: True)
            assert victim is not None
            self._policy.removed(victim)
            self._resident_bytes -= self._records.pop(victim).nbytes
        record = self.store.read_record(layer, expert)
        self._records[flat] = record
        self._policy.inserted(flat)
        self._resident_bytes += nbytes
        return record
