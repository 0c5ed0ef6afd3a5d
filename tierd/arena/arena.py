"""The daemon's arena: payload, residency table and slot states as one, always in step with each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.arena.attach_wire import ArenaOffer
from tierd.arena.fence import WriterFence
from tierd.arena.memory import EXTENT_BYTES, SharedPayload
from tierd.arena.slots import SlotCounts, SlotState, SlotTable
from tierd.arena.table import ABSENT, MAX_SLOTS, ResidencyTable
from tierd.errors import UsageError

__all__ = ["Arena"]


class Arena:
    """Slots of one size in shared memory, and the table by which readers find experts in them.

    It keeps the order on which readers without locks rely: a word leaves the table, then a full fence, then the slot
    is reused; bytes are complete and checked, then the generation rises, a fence, then the word is published.

    Attributes:
        slots: how many experts fit. `resize` changes it.
        most_slots: how many it may become.
        spares: slots on top, for reads that go on beside another read of the same expert. Any slot may serve as one;
            so many are kept back.
        slot_bytes: size of a slot.
    """

    def __init__(
        self,
        payload: SharedPayload,
        table: ResidencyTable,
        *,
        slots: int,
        slot_bytes: int,
        spares: int = 0,
        most_slots: int = 0,
    ) -> None:
        self.slots = slots
        self.most_slots = max(slots, most_slots)
        self.spares = spares
        self.slot_bytes = slot_bytes
        self._payload = payload
        self._table = table
        self._states = SlotTable(self.most_slots + spares, slots + spares)
        self._spares_in_use = 0
        self._fence = WriterFence()

    @classmethod
    def create(
        cls,
        *,
        arena_bytes: int,
        slot_bytes: int,
        experts: int,
        boot_id: bytes,
        directory: Path | None = None,
        spares: int = 0,
        growing: bool = False,
    ) -> Arena:
        """An arena of as many slots as fit `arena_bytes`, but no more than there are experts.

        Args:
            arena_bytes: bytes for experts.
            slot_bytes: the largest record.
            experts: entries of the residency table.
            boot_id: 16 random bytes of this start of the daemon.
            directory: a tmpfs directory for the payload; None takes anonymous shared memory.
            spares: slots beyond `arena_bytes`, see `Arena.spares`.
            growing: whether it may become larger later, up to all experts; that costs addresses, no memory.

        Raises:
            UsageError: not even one record fits.
            ArenaError: the memory cannot be had.
        """
        slots = min(arena_bytes // slot_bytes, experts, MAX_SLOTS - spares)
        if slots < 1:
            raise UsageError(
                f"--arena: {arena_bytes} bytes hold no expert; one takes {slot_bytes} bytes",
                hint=f"Give at least {slot_bytes} bytes.",
            )
        most = max(slots, min(experts, MAX_SLOTS - spares)) if growing else slots
        payload = SharedPayload.create(
            (slots + spares) * slot_bytes, directory, most_bytes=(most + spares) * slot_bytes
        )
        table = ResidencyTable.create(boot_id, slot_bytes=slot_bytes, slots=most + spares, entries=experts)
        payload.start_prefault()
        return cls(payload, table, slots=slots, slot_bytes=slot_bytes, spares=spares, most_slots=most)

    def __repr__(self) -> str:
        return f"<Arena {self.slots} slots of {self.slot_bytes} bytes, {self._states!r}>"

    @property
    def fenced(self) -> bool:
        """Whether the kernel offers the fence that readers without grants need; with grants they can do without."""
        return self._fence.available

    def _full_fence(self) -> None:
        if self._fence.available:
            self._fence()

    @property
    def huge_page_bytes(self) -> int:
        """Bytes of the payload on 2 MiB pages, as far as the host has given them."""
        return self._payload.huge_page_bytes

    @property
    def locked_bytes(self) -> int:
        """Bytes of the payload that cannot be swapped out; 0 where this process may not lock so much."""
        return self._payload.locked_bytes

    @property
    def granted(self) -> int:
        """Ready slots with at least one grant."""
        return self._states.granted

    @property
    def spares_left(self) -> int:
        """Free slots that are kept back."""
        return self.spares - self._spares_in_use

    def present(self) -> NDArray[np.bool_]:
        """Which experts are in RAM now, bool[experts] by flat number; a copy."""
        return self._table.present()

    def counts(self) -> SlotCounts:
        """Slots by state; they add up to `most_slots` and `spares`."""
        return self._states.counts()

    # Growing and shrinking.

    @property
    def settled(self) -> bool:
        """Whether no slot beyond the present size is in use any more."""
        return self.counts().withdrawn == self.most_slots - self.slots

    @property
    def used_bytes(self) -> int:
        """Bytes of shared memory that the present size needs, in whole extents."""
        return -(-(self.slots + self.spares) * self.slot_bytes // EXTENT_BYTES) * EXTENT_BYTES

    @property
    def excess_bytes(self) -> int:
        """Bytes of shared memory beyond that: not given back yet, or touched again by a reader."""
        return max(0, self._payload.allocated_bytes - self.used_bytes)

    def reserve(self, slots: int) -> None:
        """Get the memory for a larger size; may take seconds, and any thread may call it. Then call `resize`.

        Raises:
            ArenaError: there is not so much memory.
        """
        self._payload.grow((slots + self.spares) * self.slot_bytes)

    def resize(self, slots: int) -> None:
        """Have `slots` slots from now on, 1 to `most_slots`.

        When they are fewer, the highest ones are not given out any more; `usable` tells which those are, and `settled`
        when nothing is in them. Then `give_back_memory`.
        """
        self._states.set_active(slots + self.spares)
        self.slots = slots

    def usable(self, slot: int) -> bool:
        """Whether the slot belongs to the present size."""
        return slot < self._states.active

    def give_back_memory(self) -> None:
        """Return the memory of slots beyond the present size to the host; any thread may call it when `settled`."""
        self._payload.shrink((self.slots + self.spares) * self.slot_bytes)
        self._payload.punch()

    def move(self, slot: int, to: int, nbytes: int) -> int:
        """Copy a ready, ungranted expert of `nbytes` bytes to the free slot `to`, and return its new table word."""
        expert = self._states.expert(slot)
        assert expert is not None
        self._states.fill(to, expert)
        self.view(to, nbytes)[:] = self.view(slot, nbytes)
        # The new word takes the place of the old one, so readers of the old bytes notice; then a fence, then reuse.
        word = self.publish(to)
        self._full_fence()
        self._states.retire(slot)
        self._states.free(slot)
        return word

    def drop(self, slot: int) -> None:
        """The ready, ungranted slot leaves the table and is free, or withdrawn where it is not usable."""
        expert = self._states.expert(slot)
        assert expert is not None
        self._table.store(expert, ABSENT)
        self._full_fence()
        self._states.retire(slot)
        self._states.free(slot)

    # Slots.

    def offer(self) -> ArenaOffer:
        """What the attach socket hands to a node."""
        header = self._table.header
        return ArenaOffer(
            payload_fd=self._payload.reader_fd(),
            payload_bytes=self._payload.nbytes,
            table_fd=self._table.reader_fd(),
            boot_id=header.boot_id,
            slot_bytes=self.slot_bytes,
            slots=header.slots,
            entries=header.entries,
        )

    def take(self) -> int | None:
        """A free slot that is not kept back as a spare one; None if there is none."""
        if self._states.available <= self.spares_left:
            return None
        return self._states.take_free()

    def take_spare(self, expert: int) -> int | None:
        """A spare slot, into which a read of `expert` begins; None when all are in use."""
        if self._spares_in_use >= self.spares:
            return None
        slot = self._states.take_free()
        if slot is not None:
            self._spares_in_use += 1
            self._states.fill(slot, expert)
        return slot

    def abandon(self, slot: int) -> None:
        """Nobody waits for what comes into the filling slot any more, but a system call may still write to it."""
        self._states.abandon(slot)

    def return_spare(self, slot: int) -> None:
        """The filling or abandoned slot's last system call has returned: it is free, and a spare one is at hand."""
        if self._states.state(slot) is SlotState.FILLING:
            self._states.abandon(slot)
        self._states.free(slot)
        self._spares_in_use -= 1

    def view(self, slot: int, nbytes: int) -> memoryview:
        """The writable memory of a filling slot."""
        return self._payload.view(slot * self.slot_bytes, nbytes)

    def record(self, word: int, nbytes: int) -> memoryview:
        """The bytes behind a published word; stable while granted."""
        return self._payload.view(((word & MAX_SLOTS) - 1) * self.slot_bytes, nbytes)

    def fill(self, slot: int, expert: int) -> None:
        """A read of `expert` into the free slot begins."""
        self._states.fill(slot, expert)

    def publish(self, slot: int) -> int:
        """The filling slot holds its expert, verified: make it visible, and return its table word."""
        expert = self._states.expert(slot)
        word = self._states.landed(slot)
        self._full_fence()
        assert expert is not None
        self._table.store(expert, word)
        return word

    def unpublish(self, slots: Sequence[int]) -> None:
        """Ready, ungranted, usable slots leave the table behind one fence; they are the caller's free slots then."""
        for slot in slots:
            expert = self._states.expert(slot)
            assert expert is not None
            self._table.store(expert, ABSENT)
        self._full_fence()
        for slot in slots:
            self._states.retake(slot)

    def give_back(self, slot: int) -> None:
        """The filling slot was not filled and is free again; its last system call has returned."""
        self._states.abandon(slot)
        self._states.free(slot)

    def grant(self, slot: int) -> None:
        """One more session reads the ready slot."""
        self._states.grant(slot)

    def ungrant(self, slot: int) -> None:
        """One session less reads it."""
        self._states.ungrant(slot)

    def grants(self, slot: int) -> int:
        """How many sessions read it."""
        return self._states.grants(slot)

    def close(self) -> None:
        """Give the memory back. No read may be in flight; nodes keep their own mappings."""
        self._table.close()
        self._payload.close()
