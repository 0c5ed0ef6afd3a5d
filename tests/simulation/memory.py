"""The daemon's own arena over ordinary memory, and a policy that is watched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tierd.arena.arena import Arena
from tierd.arena.memory import SharedPayload
from tierd.arena.session_block import NewUse
from tierd.arena.table import ABSENT, ResidencyTable
from tierd.policy.policy import EvictionPolicy

__all__ = ["ObservedPolicy", "PlainPayload", "PlainSessions", "PlainTable", "plain_arena"]


class PlainPayload:
    """What the arena needs of its payload, over a bytearray."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.data = bytearray(nbytes)
        self._view = memoryview(self.data)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes."""
        return self._view[offset : offset + nbytes]

    def close(self) -> None:
        """Nothing to give back."""


class PlainTable:
    """What the arena needs of its residency table, over a list."""

    def __init__(self, entries: int) -> None:
        self.words = [ABSENT] * entries
        self.unpublished = 0
        self.left: list[int] = []
        self._used: set[int] = set()

    def load(self, expert: int) -> int:
        """The word of `expert`."""
        return self.words[expert]

    def store(self, expert: int, word: int) -> None:
        """Set the word of `expert`; no word may come twice, since readers take an equal word for an equal filling."""
        assert word not in self._used, f"the word {word:#x} was used before"
        if word != ABSENT:
            self._used.add(word)
        if word == ABSENT and self.words[expert] != ABSENT:
            self.unpublished += 1
            self.left.append(expert)
        self.words[expert] = word

    def close(self) -> None:
        """Nothing to give back."""


def plain_arena(
    *, slots: int, slot_bytes: int, experts: int, spares: int = 0, most_slots: int = 0
) -> tuple[Arena, PlainPayload, PlainTable]:
    """The arena that the daemon uses, with its slot states and its order of steps, in this process's memory."""
    payload, table = PlainPayload((max(slots, most_slots) + spares) * slot_bytes), PlainTable(experts)
    arena = Arena(
        cast("SharedPayload", payload),
        cast("ResidencyTable", table),
        slots=slots,
        slot_bytes=slot_bytes,
        spares=spares,
        most_slots=most_slots,
    )
    return arena, payload, table


class PlainSessions:
    """Session blocks of the daemon's kind, without shared memory: what sessions count and expect."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._blocks: dict[int, NDArray[np.uint32]] = {}
        self._steps: dict[int, NDArray[np.int64]] = {}
        self._counted: dict[int, NDArray[np.uint32]] = {}
        self._taken: dict[int, NDArray[np.uint32]] = {}
        self.expectations: dict[int, NDArray[np.uint8]] = {}
        self.used_now: set[tuple[int, int]] = set()

    def note_use(self, session_id: int, flat: int, step: int, *, prefill: bool = False) -> None:
        """A session counts one use."""
        if session_id not in self._blocks:
            for blocks in (self._blocks, self._counted, self._taken):
                blocks[session_id] = np.zeros((2, self._experts), np.uint32)
            self._steps[session_id] = np.zeros(self._experts, np.int64)
        self._blocks[session_id][0 if prefill else 1, flat] += 1
        self._steps[session_id][flat] = step

    def counts(self) -> Iterator[tuple[int, int, int]]:
        """See `SessionMemory.counts`."""
        for session_id, block in self._blocks.items():
            prefill, decode = (block - self._counted[session_id]).sum(axis=1).tolist()
            self._counted[session_id] = block.copy()
            yield session_id, prefill, decode

    def new_uses(self, asking: int | None) -> Iterator[tuple[int, list[NewUse]]]:
        """See `SessionMemory.new_uses`; here all are looked at each time."""
        del asking
        for session_id, block in self._blocks.items():
            rise = (block - self._taken[session_id]).astype(np.int64)
            self._taken[session_id] = block.copy()
            steps = self._steps[session_id]
            experts = np.flatnonzero(rise.any(axis=0))
            experts = experts[np.argsort(steps[experts], kind="stable")]
            columns = (experts, steps[experts], rise[0, experts], rise[1, experts])
            yield session_id, [NewUse(*use) for use in zip(*(c.tolist() for c in columns), strict=True)]

    def in_use(self, flat: int) -> bool:
        """See `SessionMemory.in_use`."""
        return any(flat == used for _, used in self.used_now)

    def begin_use(self, session_id: int, flat: int) -> None:
        """A session is about to use an expert."""
        self.used_now.add((session_id, flat))

    def end_use(self, session_id: int, flat: int) -> None:
        """Its use is over."""
        self.used_now.discard((session_id, flat))

    def end(self, session_id: int) -> None:
        """The session's process is gone: its block is read a last time, later, and its marks go."""
        self.used_now = {(session, flat) for session, flat in self.used_now if session != session_id}

    def expectation(self, session_id: int) -> NDArray[np.uint8] | None:
        """See `SessionMemory.expectation`."""
        return self.expectations.get(session_id)


class ObservedPolicy:
    """A policy, and the set of experts that it ought to know, kept apart from it."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.name = policy.name
        self.known: set[int] = set()
        self.observed = policy

    def __len__(self) -> int:
        return len(self.observed)

    def visit(self, session: int, step: int, layer: int, *, prefill: bool) -> None:
        """Pass on."""
        self.observed.visit(session, step, layer, prefill=prefill)

    def expected(self, session: int, expectation: NDArray[np.uint8]) -> None:
        """Pass on."""
        self.observed.expected(session, expectation)

    def ended(self, session: int) -> None:
        """Pass on."""
        self.observed.ended(session)

    def inserted(self, expert: int) -> None:
        """Pass on, and remember."""
        self.observed.inserted(expert)
        self.known.add(expert)

    def used(self, expert: int) -> None:
        """Pass on."""
        self.observed.used(expert)

    def used_many(self, experts: Iterable[int]) -> None:
        """Pass on."""
        self.observed.used_many(experts)

    def removed(self, expert: int) -> None:
        """Pass on, and forget."""
        self.observed.removed(expert)
        self.known.discard(expert)

    def worth(self, expert: int) -> float | None:
        """Pass on."""
        return self.observed.worth(expert)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """Pass on."""
        return self.observed.victim(evictable)
