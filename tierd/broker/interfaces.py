"""What the broker asks of the store and of the arena; the daemon, tests and simulations each bring their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.arena.session_block import NewUse
from tierd.devices.device import AttemptMemory, RecordRead

__all__ = ["Catalogue", "ResidentMemory", "SessionMemory"]


class Catalogue(Protocol):
    """The store as the broker sees it."""

    def flat(self, layer: int, expert: int) -> int:
        """Flat number of an expert; LimitExceeded for a layer or expert that the store does not have."""

    def record(self, flat: int) -> RecordRead:
        """Where the record of a flat expert number lies."""


class ResidentMemory(AttemptMemory, Protocol):
    """The arena as the broker sees it: slots in shared memory and the table that tells readers of them."""

    slots: int
    """Slots that admission may count on; the spare ones of `AttemptMemory` come on top. It may change."""

    @property
    def settled(self) -> bool:
        """Whether no slot beyond the present size is in use any more."""

    def usable(self, slot: int) -> bool:
        """Whether the slot belongs to the present size."""

    def move(self, slot: int, to: int, nbytes: int) -> int:
        """Copy a ready, ungranted expert of `nbytes` bytes to the free slot `to`, and return its new table word."""

    def drop(self, slot: int) -> None:
        """The ready, ungranted slot leaves the table and is free, or withdrawn where it is not usable."""

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


class SessionMemory(Protocol):
    """What sessions write into shared memory: uses that no message told of, and expectations."""

    def counts(self) -> Iterable[tuple[int, int, int]]:
        """Session, uses in prefill and uses in decode since the last call; the last ones of ended sessions too."""

    def new_uses(self, asking: int | None) -> Iterable[tuple[int, list[NewUse]]]:
        """By session, what it used since it was looked at last; sessions in a fixed order.

        The session `asking` is always looked at; without one, all are. Of the others, those may be left out for some
        calls that are in the same step as at the last look.
        """

    def in_use(self, flat: int) -> bool:
        """Whether a session uses the expert just now without having asked, as far as can be seen."""

    def expectation(self, session_id: int) -> NDArray[np.uint8] | None:
        """The session's estimate of what it will use soon, by flat number in 255ths; None if it makes none."""
