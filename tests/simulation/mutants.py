"""Planted bugs: what the simulation must find. Each replaces one step of the daemon by a plausible wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierd.arena.arena import Arena
from tierd.arena.slots import SlotState, SlotTable
from tierd.arena.table import ABSENT, next_generation, pack
from tierd.broker.broker import Broker
from tierd.broker.fair_reads import FairReads
from tierd.broker.reading_ahead import ReadingAhead
from tierd.broker.residents import Residents
from tierd.devices.flight import Flight
from tierd.devices.replicas import ReplicaSet
from tierd.errors import ChecksumMismatch
from tierd.policy.lru import Lru
from tierd.prefetch.hint_book import HintBook
from tierd.requests import Outcome, Reason

__all__ = ["MUTANTS", "Replacement"]

Replacement = tuple[type, str, Callable[..., Any]]
"""A class, the name of its method, and what stands in for it."""

# Kept, since some wrong steps are the right ones with a twist.
_landed, _start, _grant, _fill = Broker._landed, Broker._start, Broker._grant, Arena.fill
_move = Arena.move
_flight_landed, _pick = Flight._landed, ReplicaSet.pick
_evicted, _failed = HintBook.evicted, HintBook.failed
_end_acquire, _expire, _refuse, _admit = Broker._end_acquire, Broker._expire, Broker._refuse, Broker._admit


def _anything_resident(self: Residents, flat: int) -> bool:
    return flat in self


def _retire_blindly(self: SlotTable, slot: int) -> None:
    self._granted -= self._grants[slot] > 0
    self._grants[slot] = 0
    self._move(slot, SlotState.RETIRED)


def _publish_before_it_landed(self: Arena, slot: int, expert: int) -> None:
    _fill(self, slot, expert)
    self._table.store(expert, pack(next_generation(self._states._generations[slot]), slot))


def _publish_whatever_came(self: Broker, flat: int, error: Any, slot: int) -> None:
    _landed(self, flat, None if isinstance(error, ChecksumMismatch) else error, slot)


def _forget_the_last_waiter(self: Broker, flat: int, error: Any, slot: int) -> None:
    waiters = self._reading[flat].waiters
    del waiters[1:]
    _landed(self, flat, error, slot)


def _tell_only_the_first_of_a_failure(self: Broker, flat: int, error: Any, slot: int) -> None:
    if error is not None:
        del self._reading[flat].waiters[1:]
    _landed(self, flat, error, slot)


def _read_again_instead_of_joining(self: Broker, acquire: Any) -> None:
    for flat in acquire.wanted:
        if self._reading.pop(flat, None) is not None:
            self._policy.removed(flat)
    _start(self, acquire)


def _count_joined_as_missed_too(self: Broker, acquire: Any, resident: Any, expert: int, outcome: Outcome) -> Any:
    acquire.counts.misses += outcome is Outcome.JOINED
    return _grant(self, acquire, resident, expert, outcome)


def _count_cancelled_as_failed(
    self: Broker, acquire: Any, flats: Any, reason: Reason, detail: str, *, tell: bool
) -> None:
    _refuse(self, acquire, flats, Reason.UNAVAILABLE if reason is Reason.CANCELLED else reason, detail, tell=tell)


def _keep_the_grants_of_the_dead(self: Broker, session: Any, why: str, *, tell: bool) -> None:
    if not tell and session.acquire is not None:
        session.acquire.granted.clear()
    _end_acquire(self, session, why, tell=tell)


def _lose_the_queue_behind_the_head(self: Broker, *, ahead: bool = True) -> None:
    _admit(self, ahead=ahead)
    if len(self._queue) > 1:
        self._queue.pop()


def _admit_out_of_turn(self: Broker, *, ahead: bool = True) -> None:
    self._queue.reverse()
    _admit(self, ahead=ahead)


def _leave_the_queue_asleep_at_an_end(self: Broker, session_id: int) -> None:
    session = self._sessions.pop(session_id, None)
    if session is not None:
        _end_acquire(self, session, "the session ended", tell=False)


def _leave_the_queue_asleep_at_a_release(self: Broker, session_id: int, acquire_id: int) -> None:
    session = self._sessions[session_id]
    if session.acquire is not None and session.acquire.request.id == acquire_id:
        _end_acquire(self, session, "the session released it", tell=True)


def _free_the_slot_at_the_deadline(self: Broker, acquire: Any) -> None:
    pending = list(acquire.pending)
    _expire(self, acquire)
    for flat in pending:
        if flat in self._reading and not self._reading[flat].waiters:
            slots = self._memory._states  # type: ignore[attr-defined]
            slot = slots._experts.index(flat)
            del self._reading[flat]
            self._policy.removed(flat)
            self._memory.give_back(slot)
    _admit(self)


def _never_expire_in_the_queue(self: Broker, acquire: Any) -> None:
    if not acquire.queued:
        _expire(self, acquire)


def _admit_beyond_the_arena(self: Broker, acquire: Any) -> bool:
    return self._memory.granted + len(acquire.wanted) <= self._memory.slots


def _leave_the_word_standing(self: Arena, slots: Any) -> None:
    for slot in slots:
        self._states.retire(slot)
        self._states.free(slot)
    for _ in slots:
        self._states.take_free()


def _keep_the_generation(self: SlotTable, slot: int) -> int:
    self._generations[slot] = 1
    self._move(slot, SlotState.READY)
    return pack(1, slot)


def _forget_nobody(self: Lru, expert: int) -> None:
    self._order.move_to_end(expert)


def _empty_the_table_late(self: Arena, slot: int) -> int:
    expert = self._states.expert(slot)
    word = self._states.landed(slot)
    assert expert is not None
    self._table.store(expert, ABSENT)
    return word


def _reuse_the_losers_slot_at_once(self: Arena, slot: int) -> None:
    self.return_spare(slot)


def _lose_count_of_spares(self: Arena, slot: int) -> None:
    if self._states.state(slot) is SlotState.FILLING:
        self._states.abandon(slot)
    self._states.free(slot)


def _hedge_into_the_same_slot(self: Flight) -> bool:
    self._idle.append(self.first_slot)
    return True


def _wait_for_what_hangs(self: Flight, attempt: Any) -> None:
    del self, attempt


def _deliver_again(self: Flight, attempt: Any, error: Any, slot: int) -> None:
    if error is None:
        self._over = False
    _flight_landed(self, attempt, error, slot)


def _try_one_drive_only(self: ReplicaSet, read: Any, tried: Any, *, sound: bool = False) -> Any:
    return None if tried else _pick(self, read, tried, sound=sound)


def _move_the_word_alone(self: Arena, slot: int, to: int, nbytes: int) -> int:
    del nbytes
    return _move(self, slot, to, 0)


def _reuse_a_lost_slot(self: SlotTable, slot: int) -> None:
    self._free_list.append(slot)


def _leave_the_lost_slots_full(self: Residents, reading: int, most_bytes: int) -> bool:
    del self, reading, most_bytes
    return True


def _read_ahead_at_any_time(self: ReadingAhead) -> bool:
    return self._memory.granted + len(self._reading) < self._memory.slots


def _take_the_slot_of_anyone(self: ReadingAhead, flat: int) -> bool:
    return self._residents.idle(flat)


def _take_every_free_slot(self: ReadingAhead, entry: Any) -> Any:
    del entry
    return self._memory.take()


def _count_the_used_as_wasted_too(self: HintBook, flat: int) -> None:
    _evicted(self, flat)
    self.counts.wasted.add(1)


def _lose_a_failed_guess(self: HintBook, flat: int) -> None:
    self.reading.pop(flat, None)
    _failed(self, flat)


def _read_what_nobody_wants(self: FairReads, flat: int, others: Any) -> bool:
    del self, flat, others
    return False


def _leave_behind_what_is_wanted(self: ReadingAhead, session: int, step: int, layer: int, wanted: Any) -> None:
    del self, session, step, layer, wanted


def _keep_the_slot_of_a_read_taken_back(self: ReadingAhead, flat: int, slot: int) -> None:
    del slot
    del self._reading[flat]
    self._policy.removed(flat)


MUTANTS: dict[str, list[Replacement]] = {
    "granted experts are evicted": [
        (Residents, "evictable", _anything_resident),
        (SlotTable, "retire", _retire_blindly),
    ],
    "an expert is published before it landed": [(Arena, "fill", _publish_before_it_landed)],
    "an expert is published in spite of its checksum": [(Broker, "_landed", _publish_whatever_came)],
    "a landed expert is never published": [(Arena, "publish", _empty_the_table_late)],
    "an evicted expert's word stays in the table": [(Arena, "unpublish", _leave_the_word_standing)],
    "a waiter is forgotten when the read lands": [(Broker, "_landed", _forget_the_last_waiter)],
    "only one waiter hears of a failed read": [(Broker, "_landed", _tell_only_the_first_of_a_failure)],
    "a second read starts instead of joining": [(Broker, "_start", _read_again_instead_of_joining)],
    "joined is counted as missed too": [(Broker, "_grant", _count_joined_as_missed_too)],
    "cancelled is counted as failed": [(Broker, "_refuse", _count_cancelled_as_failed)],
    "grants outlive their session": [(Broker, "_end_acquire", _keep_the_grants_of_the_dead)],
    "a queued request is lost": [(Broker, "_admit", _lose_the_queue_behind_the_head)],
    "the queue is served out of turn": [(Broker, "_admit", _admit_out_of_turn)],
    "a release wakes nobody": [(Broker, "release", _leave_the_queue_asleep_at_a_release)],
    "an end wakes nobody": [(Broker, "close_session", _leave_the_queue_asleep_at_an_end)],
    "a slot is freed while its read still runs": [(Broker, "_expire", _free_the_slot_at_the_deadline)],
    "a queued request never expires": [(Broker, "_expire", _never_expire_in_the_queue)],
    "reads in flight need no room": [(Broker, "_fits", _admit_beyond_the_arena)],
    "a slot keeps its generation": [(SlotTable, "landed", _keep_the_generation)],
    "the loser's slot is reused while its read still runs": [(Arena, "abandon", _reuse_the_losers_slot_at_once)],
    "spare slots are used up": [(Arena, "return_spare", _lose_count_of_spares)],
    "a second attempt goes into the slot of the first": [(Flight, "_take_spare", _hedge_into_the_same_slot)],
    "a read that hangs is not saved": [(Flight, "_rescue", _wait_for_what_hangs)],
    "a record is delivered twice": [(Flight, "_landed", _deliver_again)],
    "a failed read is not tried on another drive": [(ReplicaSet, "pick", _try_one_drive_only)],
    "a moved expert leaves its bytes behind": [(Arena, "move", _move_the_word_alone)],
    "a slot that the arena lost is used again": [(SlotTable, "_list_free", _reuse_a_lost_slot)],
    "a smaller arena keeps what it has": [(Residents, "clear_out", _leave_the_lost_slots_full)],
    "a read that all gave up keeps its turn": [(FairReads, "given_up", _read_what_nobody_wants)],
    "a guess is read while requests wait": [(ReadingAhead, "_quiet", _read_ahead_at_any_time)],
    "a guess takes the slot of one just used": [(ReadingAhead, "_spare", _take_the_slot_of_anyone)],
    "guesses fill the arena": [(ReadingAhead, "_slot_for", _take_every_free_slot)],
    "a used guess is wasted too": [(HintBook, "evicted", _count_the_used_as_wasted_too)],
    "a failed guess is counted nowhere": [(HintBook, "failed", _lose_a_failed_guess)],
    "a guess that is wanted waits behind what is not": [(ReadingAhead, "asked", _leave_behind_what_is_wanted)],
    "a guess taken back keeps its slot": [(ReadingAhead, "undo", _keep_the_slot_of_a_read_taken_back)],
    "the policy keeps what has left": [(Lru, "removed", _forget_nobody)],
}
"""By what goes wrong."""
