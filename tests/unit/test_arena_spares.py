"""Spare slots: kept back from admission, lent to further reads of an expert, and never lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from simulation.memory import plain_arena

from tierd.arena.slots import SlotState
from tierd.errors import ArenaError

SLOTS, SPARES, EXPERTS = 4, 2, 32


def make():
    return plain_arena(slots=SLOTS, slot_bytes=64, experts=EXPERTS, spares=SPARES)[0]


def test_admission_gets_the_slots_it_may_count_on_and_no_more():
    arena = make()
    taken = [arena.take() for _ in range(SLOTS)]
    assert None not in taken
    assert arena.take() is None
    assert sum(arena.counts()[:5]) == SLOTS + SPARES
    assert arena.spares_left == SPARES


def test_spares_are_lent_until_none_is_left_and_come_back():
    arena = make()
    lent = [arena.take_spare(7) for _ in range(SPARES)]
    assert None not in lent
    assert arena.take_spare(7) is None
    arena.return_spare(lent[0])
    assert arena.take_spare(8) is not None


def test_the_first_slot_may_come_back_in_place_of_the_spare_one_that_won():
    arena = make()
    first = arena.take()
    arena.fill(first, 3)
    spare = arena.take_spare(3)
    arena.abandon(first)
    arena.publish(spare)
    assert arena.spares_left == SPARES - 1
    others = [arena.take() for _ in range(SLOTS - 1)]
    assert None not in others
    assert arena.take() is None, "the published spare one counts as one of the slots, the abandoned one as a spare"
    arena.return_spare(first)
    assert arena.spares_left == SPARES
    assert arena.take() is None


def test_only_a_slot_with_a_read_can_be_returned():
    arena = make()
    with pytest.raises(ArenaError):
        arena.return_spare(0)
    with pytest.raises(ArenaError):
        arena.abandon(0)


@settings(max_examples=60, stateful_step_count=60)
class SpareSlots(RuleBasedStateMachine):
    """Reads with up to three attempts each, that end in any order, in an arena whose experts come and go."""

    def __init__(self):
        super().__init__()
        self.arena = make()
        self.reads = {}
        self.abandoned = []
        self.ready = []
        self.expert = 0

    @rule()
    def begin(self):
        slot = self.arena.take()
        assert (slot is None) == (len(self.reads) + len(self.ready) == SLOTS)
        if slot is not None:
            self.expert = (self.expert + 1) % EXPERTS
            self.arena.fill(slot, self.expert)
            self.reads[self.expert] = [slot]

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def hedge(self, data):
        expert = data.draw(st.sampled_from(sorted(self.reads)))
        slot = self.arena.take_spare(expert)
        lent = sum(len(slots) - 1 for slots in self.reads.values()) + len(self.abandoned)
        assert (slot is None) == (lent == SPARES)
        if slot is not None:
            self.reads[expert].append(slot)

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def win(self, data):
        expert = data.draw(st.sampled_from(sorted(self.reads)))
        slots = self.reads.pop(expert)
        winner = data.draw(st.sampled_from(slots))
        for slot in slots:
            if slot != winner:
                self.arena.abandon(slot)
                self.abandoned.append(slot)
        self.arena.publish(winner)
        self.ready.append(winner)

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def fail(self, data):
        expert = data.draw(st.sampled_from(sorted(self.reads)))
        *others, last = self.reads.pop(expert)
        for slot in others:
            self.arena.return_spare(slot)
        self.arena.give_back(last)

    @precondition(lambda self: self.abandoned)
    @rule(data=st.data())
    def return_late(self, data):
        self.arena.return_spare(self.abandoned.pop(data.draw(st.integers(0, len(self.abandoned) - 1))))

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def evict(self, data):
        slot = self.ready.pop(data.draw(st.integers(0, len(self.ready) - 1)))
        self.arena.unpublish([slot])
        self.expert = (self.expert + 1) % EXPERTS
        if self.expert in self.reads:
            self.arena.fill(slot, self.expert)
            self.arena.give_back(slot)
        else:
            self.arena.fill(slot, self.expert)
            self.reads[self.expert] = [slot]

    @invariant()
    def nothing_is_lost(self):
        states = self.arena._states
        for slot in self.abandoned:
            assert states.state(slot) is SlotState.ABANDONED
        filling = sum(map(len, self.reads.values()))
        counts = self.arena.counts()
        assert (counts.filling, counts.ready, counts.abandoned) == (filling, len(self.ready), len(self.abandoned))
        assert counts.free == SLOTS + SPARES - filling - len(self.ready) - len(self.abandoned)
        assert counts.free >= self.arena.spares_left


TestSpareSlots = SpareSlots.TestCase
