"""Keep-values that are worked out late decide as those did that were worked out at every change."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.policy import rising_heap
from tierd.policy.decayed_frequency import DecayedFrequency
from tierd.policy.expected_frequency import ExpectedFrequency
from tierd.policy.keep_heap import KeepHeap

EXPERTS = 24
HALF_LIFE = 5.0


class AtOnce:
    """The same rule, with every value put in order when it changes."""

    def __init__(self, weight):
        self.now = 0.0
        self.scale = weight / 255 / (1 - 2 ** (-1 / HALF_LIFE))
        self.steps, self.weights, self.expected = {}, {}, {}
        self.heap = KeepHeap()

    def visit(self, session, step):
        if self.steps.get(session) != step:
            self.steps[session] = step
            self.now += 1 / HALF_LIFE

    def value(self, expert):
        weight = self.weights.get(expert, float("-inf"))
        expected = sum(int(out[expert]) for out in self.expected.values())
        if not expected:
            return weight
        return self.now + log2(self.scale * expected + 2 ** max(weight - self.now, -1000.0))

    def put(self, expert):
        self.heap.put(expert, self.value(expert))

    def used(self, expert):
        weight = self.weights.get(expert)
        self.weights[expert] = self.now if weight is None else self.now + log2(1 + 2 ** max(weight - self.now, -1000.0))
        self.put(expert)

    def expect(self, session, out):
        changed = np.flatnonzero(self.expected.get(session, np.zeros(EXPERTS, np.uint8)) != out)
        self.expected[session] = out.copy()
        for expert in changed.tolist():
            if expert in self.heap:
                self.put(expert)


class Pair:
    """A policy and the model, told the same."""

    def __init__(self, make):
        self.policy, self.model = make(HALF_LIFE), AtOnce(1.4)
        self.expecting = make is ExpectedFrequency
        self.outs = {session: np.zeros(EXPERTS, np.uint8) for session in (1, 2)}
        self.steps = dict.fromkeys(self.outs, 0)

    def use(self, _session, experts):
        for expert in experts:
            if expert not in self.model.heap:
                if len(self.model.heap) == 8:
                    self.leave()
                self.policy.inserted(expert)
                self.model.put(expert)
        there = [expert for expert in experts if expert in self.model.heap]
        self.policy.used_many(there)
        for expert in there:
            self.model.used(expert)

    def step(self, session, _nothing):
        self.steps[session] += 1
        self.policy.visit(session, self.steps[session], 0, prefill=False)
        self.model.visit(session, self.steps[session])

    def expect(self, session, changes):
        for expert, value in changes if self.expecting else ():
            self.outs[session][expert] = value
        self.policy.expected(session, self.outs[session])
        self.model.expect(session, self.outs[session])

    def end(self, session, _nothing):
        self.policy.ended(session)
        self.model.steps.pop(session, None)
        self.model.expect(session, np.zeros(EXPERTS, np.uint8))

    def ask(self, odd, _nothing):
        assert self.policy.victim(lambda e: e % 4 != odd) == self.model.heap.lowest(lambda e: e % 4 != odd)

    def leave(self):
        victim = self.model.heap.lowest(lambda _: True)
        assert self.policy.victim(lambda _: True) == victim
        self.policy.removed(victim)
        self.model.heap.drop(victim)


HISTORY = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.integers(1, 2), st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=4)),
        st.tuples(st.just("step"), st.integers(1, 2), st.just(())),
        st.tuples(
            st.just("expect"),
            st.integers(1, 2),
            st.lists(st.tuples(st.integers(0, EXPERTS - 1), st.sampled_from([0, 0, 40, 200])), max_size=5),
        ),
        st.tuples(st.just("ask"), st.integers(0, 3), st.just(())),
        st.tuples(st.just("end"), st.integers(1, 2), st.just(())),
    ),
    max_size=60,
)


@pytest.mark.parametrize("most_behind", [1, 512])
@pytest.mark.parametrize("make", [DecayedFrequency, ExpectedFrequency])
@settings(max_examples=80, deadline=None)
@given(history=HISTORY)
def test_victims_are_those_of_values_put_in_order_at_once_ties_included(make, most_behind, history):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rising_heap, "_MOST_BEHIND", most_behind)
        pair = Pair(make)
        for what, number, which in history:
            getattr(pair, what)(number, which)
        while len(pair.policy):
            pair.leave()
        assert not len(pair.model.heap)
