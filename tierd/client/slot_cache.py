"""Records in this process's own memory: a bounded number of slots, and a policy that says who leaves them."""

from __future__ import annotations

import mmap
from contextlib import suppress
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierd.client.source import DirectAccess, StepMemory
from tierd.errors import LimitExceeded, UsageError
from tierd.policy.policy import EvictionPolicy
from tierd.requests import Phase
from tierd.sizes import format_bytes
from tierd.store.geometry import Geometry

__all__ = ["SlotCache"]

_HUGE: Final = 2 << 20
_SLOT_BITS: Final = 24
_SLOT_MASK: Final = (1 << _SLOT_BITS) - 1
_SESSION: Final = 0
"""The policy's number for the only node that there is here."""


class SlotCache:
    """Slots of anonymous memory with one word per expert, as `DirectAccess` describes them.

    Nothing runs in the background: bytes change in `put` alone, so native code that reads by `direct` between two
    calls is never disturbed. Memory is taken as slots are filled, in pages of 2 MiB where the system gives them.

    Args:
        geometry: of the store.
        budget: most bytes of records kept; None keeps all that come.
        policy: a new one; it says who leaves.
        huge_pages: take pages of 2 MiB where the system gives them; without, pages of 4 KiB, for comparisons.

    Attributes:
        resident_bytes: bytes of the records kept now; never above the budget.

    Raises:
        UsageError: the budget is smaller than the store's largest record.
        LimitExceeded: the system refuses so much address space.
    """

    def __init__(
        self, geometry: Geometry, *, budget: int | None, policy: EvictionPolicy, huge_pages: bool = True
    ) -> None:
        needed, total = geometry.slot_bytes, geometry.experts_total
        if budget is not None and budget < needed:
            raise UsageError(
                f"a budget of {format_bytes(budget)} holds no expert: one takes {format_bytes(needed)}",
                hint=f"Give --arena at least {needed} bytes.",
            )
        self.slots = total if budget is None else min(total, budget // needed)
        self.resident_bytes = 0
        self._geometry = geometry
        self._policy = policy
        self._memory = _reserve(self.slots * needed, huge_pages=huge_pages)
        self._words = np.zeros(total, np.uint64)
        self._uses = np.zeros((2, total), np.uint32)
        self._seen = np.zeros((2, total), np.uint32)
        self._last_step = np.zeros(total, np.uint32)
        self._step = np.zeros(1, np.uint64)
        self._in_use = np.zeros(total, np.uint8)
        self._expect = np.zeros(total, np.uint8)
        self._generation = 0
        self._free = list(range(self.slots - 1, -1, -1))

    @cached_property
    def direct(self) -> DirectAccess:
        """Addresses of the words, slots and counters; they stay."""
        return DirectAccess(
            epoch=1,
            table=self._words.ctypes.data,
            payload=self._memory.ctypes.data,
            slot_bytes=self._geometry.slot_bytes,
            entries=len(self._words),
            step=self._step.ctypes.data,
            in_use=self._in_use.ctypes.data,
            last_step=self._last_step.ctypes.data,
            prefill_uses=self._uses[0].ctypes.data,
            decode_uses=self._uses[1].ctypes.data,
        )

    @cached_property
    def step_memory(self) -> StepMemory:
        """Where the node says what it expects; the policy hears of it in `visit`."""
        return StepMemory(self._expect, self._last_step)

    def __contains__(self, flat: int) -> bool:
        return bool(self._words[flat] != 0)

    def visit(self, layer: int, *, step: int, phase: Phase) -> None:
        """A layer of a step begins: tell the policy what native code used since the last time, and what is expected."""
        changed = np.flatnonzero((self._uses != self._seen).any(axis=0))
        place = None
        for flat in changed[np.argsort(self._last_step[changed], kind="stable")].tolist():
            if flat in self:
                prefill = bool(self._uses[0, flat] != self._seen[0, flat])
                if place != (here := (int(self._last_step[flat]), self._geometry.locate(flat)[0], prefill)):
                    place = here
                    self._policy.visit(_SESSION, here[0], here[1], prefill=prefill)
                self._policy.used(flat)
        self._seen[:, changed] = self._uses[:, changed]
        self._policy.visit(_SESSION, step, layer, prefill=phase is Phase.PREFILL)
        self._policy.expected(_SESSION, self._expect)

    def use(self, flat: int, *, step: int) -> int:
        """The address of a record that is here; it stays until the next `put`. The use counts for the policy."""
        self._policy.used(flat)
        self._last_step[flat] = step & 0xFFFFFFFF
        return self._address(flat)

    def put(self, flat: int, record: NDArray[np.uint8]) -> None:
        """Keep a record that is not here; the one of the lowest keep-value leaves if there is no room."""
        if not self._free:
            victim = self._policy.victim(lambda _: True)
            assert victim is not None
            self._policy.removed(victim)
            self._free.append(self._slot(victim))
            self._words[victim] = 0
            self.resident_bytes -= self._record_bytes(victim)
        slot = self._free.pop()
        start = slot * self._geometry.slot_bytes
        self._memory[start : start + record.nbytes] = record
        self._generation += 1
        self._words[flat] = self._generation << _SLOT_BITS | (slot + 1)
        self._policy.inserted(flat)
        self.resident_bytes += record.nbytes

    def _record_bytes(self, flat: int) -> int:
        return self._geometry.layout(self._geometry.locate(flat)[0]).record_bytes

    def _slot(self, flat: int) -> int:
        return (int(self._words[flat]) & _SLOT_MASK) - 1

    def _address(self, flat: int) -> int:
        return int(self._memory.ctypes.data) + self._slot(flat) * self._geometry.slot_bytes


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
    with suppress(OSError, AttributeError):  # a kernel without huge pages refuses both
        memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    skip = -whole.ctypes.data % _HUGE
    return whole[skip : skip + nbytes]
