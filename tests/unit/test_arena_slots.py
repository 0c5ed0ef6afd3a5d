from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierd.arena.slots import SlotState, SlotTable
from tierd.arena.table import MAX_SLOTS, unpack
from tierd.errors import ArenaError, LimitExceeded

SLOTS = 5


class SlotLife(RuleBasedStateMachine):
    """Random legal and illegal steps against a plain model: a dictionary of states."""

    def __init__(self):
        super().__init__()
        self.table = SlotTable(SLOTS)
        self.states = dict.fromkeys(range(SLOTS), SlotState.FREE)
        self.grants = dict.fromkeys(range(SLOTS), 0)
        self.experts: dict[int, int] = {}
        self.words: set[int] = set()
        self.taken: set[int] = set()
        self.active = SLOTS

    def freed(self, slot):
        self.states[slot] = SlotState.FREE if slot < self.active else SlotState.WITHDRAWN

    def attempt(self, legal: bool, step, *args):
        if legal:
            return step(*args)
        with pytest.raises(ArenaError, match=r"slot \d"):
            step(*args)
        return None

    @rule()
    def take(self):
        free = {s for s, state in self.states.items() if state is SlotState.FREE} - self.taken
        assert all(slot < self.active for slot in free)
        slot = self.table.take_free()
        if free:
            assert slot in free
            self.taken.add(slot)
        else:
            assert slot is None

    @rule(slot=st.integers(0, SLOTS - 1))
    def give_back(self, slot):
        legal = slot in self.taken
        self.attempt(legal, self.table.give_back, slot)
        self.taken.discard(slot)
        if legal:
            self.freed(slot)

    @rule(slot=st.integers(0, SLOTS - 1), expert=st.integers(0, 99))
    def fill(self, slot, expert):
        legal = slot in self.taken
        self.attempt(legal, self.table.fill, slot, expert)
        if legal:
            self.taken.remove(slot)
            self.states[slot] = SlotState.FILLING
            self.experts[slot] = expert

    @rule(slot=st.integers(0, SLOTS - 1))
    def land(self, slot):
        legal = self.states[slot] is SlotState.FILLING
        word = self.attempt(legal, self.table.landed, slot)
        if legal:
            assert unpack(word)[1] == slot
            assert word not in self.words, "a slot's word must be new each time it is filled"
            self.words.add(word)
            self.states[slot] = SlotState.READY
            assert self.table.word(slot) == word

    @rule(slot=st.integers(0, SLOTS - 1))
    def abandon(self, slot):
        legal = self.states[slot] is SlotState.FILLING
        self.attempt(legal, self.table.abandon, slot)
        if legal:
            self.states[slot] = SlotState.ABANDONED

    @rule(slot=st.integers(0, SLOTS - 1))
    def retire(self, slot):
        legal = self.states[slot] is SlotState.READY and not self.grants[slot]
        self.attempt(legal, self.table.retire, slot)
        if legal:
            self.states[slot] = SlotState.RETIRED

    @rule(slot=st.integers(0, SLOTS - 1))
    def free(self, slot):
        legal = self.states[slot] in (SlotState.RETIRED, SlotState.ABANDONED)
        self.attempt(legal, self.table.free, slot)
        if legal:
            self.freed(slot)
            del self.experts[slot]

    @rule(slot=st.integers(0, SLOTS - 1))
    def retake(self, slot):
        legal = self.states[slot] is SlotState.READY and not self.grants[slot] and slot < self.active
        self.attempt(legal, self.table.retake, slot)
        if legal:
            self.freed(slot)
            del self.experts[slot]
            self.taken.add(slot)

    @rule(active=st.integers(1, SLOTS))
    def resize(self, active):
        self.table.set_active(active)
        self.active = active
        for slot, state in self.states.items():
            if state in (SlotState.FREE, SlotState.WITHDRAWN) and slot not in self.taken:
                self.freed(slot)

    @rule(slot=st.integers(0, SLOTS - 1))
    def grant(self, slot):
        legal = self.states[slot] is SlotState.READY
        self.attempt(legal, self.table.grant, slot)
        self.grants[slot] += legal

    @rule(slot=st.integers(0, SLOTS - 1))
    def ungrant(self, slot):
        legal = self.grants[slot] > 0
        self.attempt(legal, self.table.ungrant, slot)
        self.grants[slot] -= legal

    @precondition(lambda self: any(s is SlotState.FILLING for s in self.states.values()))
    @rule()
    def a_filling_slot_is_never_given_out(self):
        given = []
        while (slot := self.table.take_free()) is not None:
            given.append(slot)
        assert all(self.states[slot] is SlotState.FREE for slot in given)
        for slot in given:
            self.table.give_back(slot)

    @invariant()
    def counts_and_states_agree(self):
        counts = self.table.counts()
        assert sum(counts) - counts.granted == SLOTS
        for state in SlotState:
            assert getattr(counts, state.value) == sum(s is state for s in self.states.values())
        assert counts.granted == sum(n > 0 for n in self.grants.values())
        for slot, state in self.states.items():
            assert self.table.state(slot) is state
            assert self.table.expert(slot) == self.experts.get(slot)
            assert self.table.grants(slot) == self.grants[slot]


TestSlotLife = SlotLife.TestCase
TestSlotLife.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_representation_tells_the_states():
    table = SlotTable(4)
    for expert in (7, 8):
        table.fill(table.take_free(), expert)
    table.landed(0)
    table.grant(0)
    assert repr(table) == "slots: 2 free, 1 filling, 1 ready (1 granted)"
    table.abandon(1)
    assert repr(table).endswith("1 abandoned")
    assert len(table) == 4


def test_generation_wraps_to_one_and_never_makes_an_absent_word():
    table = SlotTable(1)
    table._generations[0] = (1 << 40) - 2
    words = []
    for _ in range(2):
        table.fill(table.take_free(), 0)
        words.append(table.landed(0))
        table.retire(0)
        table.free(0)
    assert [unpack(word) for word in words] == [((1 << 40) - 1, 0), (1, 0)]


@pytest.mark.parametrize("slots", [0, -1, MAX_SLOTS + 1])
def test_impossible_numbers_of_slots_are_refused(slots):
    with pytest.raises(LimitExceeded, match=str(slots)):
        SlotTable(slots)


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_outside_the_arena_is_named(slot):
    with pytest.raises(ArenaError, match=f"slot {slot} does not exist"):
        SlotTable(4).state(slot)
