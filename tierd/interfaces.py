"""What the broker asks of the store and of the arena; the daemon, tests and simulations each bring their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tierd.devices.device import AttemptMemory, RecordRead

__all__ = ["Catalogue", "ResidentMemory"]


class Catalogue(Protocol):
    """The store as the broker sees it."""

    def flat(self, layer: int, expert: int) -> int:
        """Flat number of an expert; LimitExceeded for a layer or expert that the store does not have."""

    def record(self, flat: int) -> RecordRead:
        """Where the record of a flat expert number lies."""


class ResidentMemory(AttemptMemory, Protocol):
    """The arena as the broker sees it: slots in shared memory and the table that tells readers of them."""

    slots: int
    """Slots that admission may count on; the spare ones of `AttemptMemory` come on top."""

    @property
    def granted(self) -> int:
        """Ready slots with at least one grant."""

    def take(self) -> int | None:
        """A free slot that is not kept back as a spare one; None if there is none."""

    def fill(self, slot: int, expert: int) -> None:
        """A read of `expert` into the free slot begins."""

    def publish(self, slot: int) -> int:
        """The filling slot holds its expert, verified: make it visible, and return its table word."""

    def unpublish(self, slots: Sequence[int]) -> None:
        """The ready, ungranted slots leave the table, behind one fence; they are the caller's free slots then."""

    def give_back(self, slot: int) -> None:
        """The filling slot was not filled and is free again; its last system call has returned."""

    def grant(self, slot: int) -> None:
        """One more session reads the ready slot."""

    def ungrant(self, slot: int) -> None:
        """One session less reads it."""

    def grants(self, slot: int) -> int:
        """How many sessions read it."""
