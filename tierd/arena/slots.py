"""The life of an arena slot, as a pure state machine.

    FREE → FILLING → READY → RETIRED → FREE ⇄ WITHDRAWN
               └──→ ABANDONED ──────────↑

A slot with a system call into it is FILLING or ABANDONED and can be nothing else: a direct read cannot be called back,
so such a slot is never published, reused or given back before the call returned. A granted slot cannot retire.

An arena that shrinks loses its highest slots: they are WITHDRAWN, those in use as soon as they become free.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tierd.arena.table import MAX_SLOTS, next_generation, pack
from tierd.errors import ArenaError, LimitExceeded

__all__ = ["SlotCounts", "SlotState", "SlotTable"]


class SlotState(Enum):
    """Where a slot is in its life."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    RETIRED = "retired"
    ABANDONED = "abandoned"
    WITHDRAWN = "withdrawn"

    # A state's own hash is of its name, computed anew each time; every read counts slots by state a dozen times.
    __hash__ = object.__hash__


class SlotCounts(NamedTuple):
    """How many slots are in each state; `granted` are those of `ready` that hold at least one grant."""

    free: int
    filling: int
    ready: int
    retired: int
    abandoned: int
    granted: int
    withdrawn: int = 0


class SlotTable:
    """States, generations and grants of all slots; every operation takes constant time.

    Args:
        slots: how many slots there are, 1 to 2**24 - 1.
        active: how many of them, from the lowest, may be used; all if None.

    Attributes:
        active: as given, or as `set_active` said last.

    Raises:
        LimitExceeded: for another number of slots.
        ArenaError: from any method, for a step that the state machine does not have: an error of the caller.
    """

    def __init__(self, slots: int, active: int | None = None) -> None:
        if not 1 <= slots <= MAX_SLOTS:
            raise LimitExceeded(
                f"an arena of {slots} slots is outside the limits of 1 to {MAX_SLOTS}",
                hint="Change the arena's size; one slot holds one expert.",
            )
        self._states = [SlotState.FREE] * slots
        self._experts: list[int | None] = [None] * slots
        self._generations = [0] * slots
        self._grants = [0] * slots
        self._taken = bytearray(slots)
        # Last in, first out: a slot used a moment ago is likelier to be in the processor's caches.
        self._free_list = list(range(slots - 1, -1, -1))
        self._in_state = dict.fromkeys(SlotState, 0)
        self._in_state[SlotState.FREE] = slots
        self._granted = 0
        self.active = slots
        if active is not None:
            self.set_active(active)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        n = self._in_state
        parts = [f"{n[SlotState.FREE]} free", f"{n[SlotState.FILLING]} filling"]
        parts.append(f"{n[SlotState.READY]} ready ({self._granted} granted)")
        parts += [f"{n[s]} {s.value}" for s in (SlotState.RETIRED, SlotState.ABANDONED, SlotState.WITHDRAWN) if n[s]]
        return f"slots: {', '.join(parts)}"

    def set_active(self, active: int) -> None:
        """Use the lowest `active` slots only, 1 to all: one step for each slot of the table, so not a frequent call."""
        if not 1 <= active <= len(self._states):
            raise LimitExceeded(f"{active} of {len(self._states)} slots cannot be used")
        self.active = active
        for slot in self._free_list:
            if slot >= active:
                self._move(slot, SlotState.WITHDRAWN)
        # The lowest are taken first, so that the next shrinking finds the highest empty.
        back = [slot for slot in range(active - 1, -1, -1) if self._states[slot] is SlotState.WITHDRAWN]
        for slot in back:
            self._move(slot, SlotState.FREE)
        self._free_list = back + [slot for slot in self._free_list if slot < active]

    @property
    def granted(self) -> int:
        """Slots with at least one grant."""
        return self._granted

    @property
    def available(self) -> int:
        """Slots that `take_free` can still give."""
        return len(self._free_list)

    def take_free(self) -> int | None:
        """A free slot, now off the free list, for `fill` or `give_back`; None when there is none."""
        if not self._free_list:
            return None
        slot = self._free_list.pop()
        self._taken[slot] = 1
        return slot

    def give_back(self, slot: int) -> None:
        """Put a slot that `take_free` gave, and that was not filled, on the free list again."""
        self._expect(slot, SlotState.FREE, "give back")
        if not self._taken[slot]:
            raise ArenaError(f"slot {slot} was not taken, so it cannot be given back")
        self._taken[slot] = 0
        self._list_free(slot)

    def fill(self, slot: int, expert: int) -> None:
        """A read of `expert` into the taken `slot` is about to start."""
        self._expect(slot, SlotState.FREE, "fill")
        if not self._taken[slot]:
            raise ArenaError(f"slot {slot} was not taken from the free list, so it cannot be filled")
        self._taken[slot] = 0
        self._experts[slot] = expert
        self._move(slot, SlotState.FILLING)

    def landed(self, slot: int) -> int:
        """The read ended well and its checksum is right: READY, in a new generation.

        Returns:
            The word to publish in the residency table, after a fence.
        """
        self._expect(slot, SlotState.FILLING, "land")
        self._generations[slot] = next_generation(self._generations[slot])
        self._move(slot, SlotState.READY)
        return pack(self._generations[slot], slot)

    def abandon(self, slot: int) -> None:
        """The read failed, or nobody waits for it any more while its system call may still run."""
        self._expect(slot, SlotState.FILLING, "abandon")
        self._move(slot, SlotState.ABANDONED)

    def retire(self, slot: int) -> None:
        """The expert's word is absent and the fence has passed: nobody finds the slot any more."""
        self._expect(slot, SlotState.READY, "retire")
        if self._grants[slot]:
            raise ArenaError(f"slot {slot} has {self._grants[slot]} grants and cannot retire")
        self._move(slot, SlotState.RETIRED)

    def retake(self, slot: int) -> None:
        """The slot, below `active`, retires, becomes free and is taken again, for `fill` or `give_back`, in one."""
        self._expect(slot, SlotState.READY, "retire")
        if self._grants[slot] or slot >= self.active:
            raise ArenaError(f"slot {slot} has {self._grants[slot]} grants or no place, and cannot be taken again")
        self._experts[slot] = None
        self._move(slot, SlotState.FREE)
        self._taken[slot] = 1

    def free(self, slot: int) -> None:
        """Nothing reads or writes the slot any more; it may be taken again."""
        state = self.state(slot)
        if state not in (SlotState.RETIRED, SlotState.ABANDONED):
            raise ArenaError(f"slot {slot} is {state.value}; only a retired or abandoned slot can become free")
        self._experts[slot] = None
        self._move(slot, SlotState.FREE)
        self._list_free(slot)

    def grant(self, slot: int) -> None:
        """A session relies on the ready slot until `ungrant`. Grants are counted."""
        self._expect(slot, SlotState.READY, "grant")
        self._granted += not self._grants[slot]
        self._grants[slot] += 1

    def ungrant(self, slot: int) -> None:
        """One grant of the slot ended."""
        self._expect(slot, SlotState.READY, "end a grant of")
        if not self._grants[slot]:
            raise ArenaError(f"slot {slot} has no grant that could end")
        self._grants[slot] -= 1
        self._granted -= not self._grants[slot]

    def grants(self, slot: int) -> int:
        """How many grants the slot holds."""
        self._check(slot)
        return self._grants[slot]

    def expert(self, slot: int) -> int | None:
        """The flat number of the expert that is or comes into the slot; None for a free one."""
        self._check(slot)
        return self._experts[slot]

    def state(self, slot: int) -> SlotState:
        """Where the slot is in its life."""
        self._check(slot)
        return self._states[slot]

    def word(self, slot: int) -> int:
        """The residency word under which the ready slot is published."""
        self._expect(slot, SlotState.READY, "name the word of")
        return pack(self._generations[slot], slot)

    def counts(self) -> SlotCounts:
        """How many slots are in each state."""
        n = self._in_state
        return SlotCounts(
            free=n[SlotState.FREE],
            filling=n[SlotState.FILLING],
            ready=n[SlotState.READY],
            retired=n[SlotState.RETIRED],
            abandoned=n[SlotState.ABANDONED],
            granted=self._granted,
            withdrawn=n[SlotState.WITHDRAWN],
        )

    def _list_free(self, slot: int) -> None:
        if slot < self.active:
            self._free_list.append(slot)
        else:
            self._move(slot, SlotState.WITHDRAWN)

    def _check(self, slot: int) -> None:
        if not 0 <= slot < len(self._states):
            raise ArenaError(f"slot {slot} does not exist; the arena has slots 0 to {len(self._states) - 1}")

    def _expect(self, slot: int, state: SlotState, verb: str) -> None:
        if slot < 0 or slot >= len(self._states) or self._states[slot] is not state:
            self._check(slot)
            raise ArenaError(
                f"cannot {verb} slot {slot}: it is {self._states[slot].value}, and this needs {state.value}"
            )

    def _move(self, slot: int, state: SlotState) -> None:
        self._in_state[self._states[slot]] -= 1
        self._in_state[state] += 1
        self._states[slot] = state
