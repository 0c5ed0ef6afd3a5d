"""What every eviction policy must do, whatever it prefers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierd.errors import UsageError
from tierd.policy.belady import Belady
from tierd.policy.lru import Lru
from tierd.policy.policies import POLICIES, make_policy
from tierd.policy.policy import EvictionPolicy

EXPERTS = st.integers(0, 9)


class UnknowingBelady(Belady):
    """Belady's rule without a future: all that the suite asks of a policy still holds."""

    def __init__(self):
        super().__init__([range(10)] * 60)


MAKERS = {name: lambda name=name: make_policy(name) for name in POLICIES} | {
    Belady.name: UnknowingBelady,
    "decayed-frequency-7": lambda: make_policy("decayed-frequency-7"),
}


@pytest.fixture(params=sorted(MAKERS))
def policy(request):
    return MAKERS[request.param]()


def test_it_is_an_eviction_policy_that_knows_its_name(policy):
    assert isinstance(policy, EvictionPolicy)
    assert type(policy).name in {*POLICIES, Belady.name}
    assert policy.name in repr(policy)


def test_an_empty_policy_has_no_victim(policy):
    assert len(policy) == 0
    assert policy.victim(lambda _: True) is None


def test_errors_of_the_caller_are_named(policy):
    policy.inserted(4)
    with pytest.raises(UsageError, match="expert 4"):
        policy.inserted(4)
    for step in (policy.used, policy.removed):
        with pytest.raises(UsageError, match="expert 5"):
            step(5)
    assert len(policy) == 1


def test_a_victim_stays_until_it_is_removed(policy):
    policy.inserted(1)
    assert policy.victim(lambda _: True) == 1
    assert len(policy) == 1
    assert policy.victim(lambda _: True) == 1
    policy.removed(1)
    assert policy.victim(lambda _: True) is None


@pytest.mark.parametrize("name", sorted(MAKERS))
@settings(max_examples=50, deadline=None)
@given(uses=st.lists(EXPERTS, max_size=50), refused=st.sets(EXPERTS), layers=st.lists(st.integers(0, 3), min_size=1))
def test_the_victim_is_resident_and_evictable_and_found_whenever_there_is_one(name, uses, refused, layers):
    policy = MAKERS[name]()
    resident: set[int] = set()
    for number, expert in enumerate(uses):
        layer = layers[number % len(layers)]
        policy.visit(number % 2, number // 3, layer, prefill=number % 5 == 0)
        policy.expected(number % 2, np.arange(10, dtype=np.uint8) * layer)
        if number == 30:
            policy.ended(1)
        if expert in resident:
            policy.used(expert)
        else:
            policy.inserted(expert)
            resident.add(expert)
        if len(resident) > 6:
            victim = policy.victim(lambda e: e not in refused)
            if resident <= refused:
                assert victim is None
            else:
                assert victim in resident - refused
                policy.removed(victim)
                resident.remove(victim)
        assert len(policy) == len(resident)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_same_history_gives_the_same_victims(name):
    def victims():
        policy = make_policy(name)
        out = []
        for n in range(400):
            expert = n * n % 97
            policy.visit(0, n // 8, n % 8, prefill=False)
            try:
                policy.used(expert)
            except UsageError:
                policy.inserted(expert)
            if len(policy) > 20:
                out.append(policy.victim(lambda e: e % 7 != 0))
                policy.removed(out[-1])
        return out

    assert victims() == victims()


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_sessions_that_end_unknown_and_expectations_of_any_length_are_harmless(name):
    policy = MAKERS[name]()
    policy.inserted(3)
    policy.ended(17)
    for size in (5, 2, 0, 9):
        policy.expected(1, np.full(size, 255, np.uint8))
    policy.used(3)
    policy.ended(1)
    policy.ended(1)
    assert policy.victim(lambda _: True) == 3


class LruAgainstAList(RuleBasedStateMachine):
    """LRU is fully specified: a list in order of the last use, oldest first, is its model."""

    def __init__(self):
        super().__init__()
        self.policy = Lru()
        self.order: list[int] = []

    @rule(expert=EXPERTS)
    def insert_or_use(self, expert):
        if expert in self.order:
            self.policy.used(expert)
            self.order.remove(expert)
        else:
            self.policy.inserted(expert)
        self.order.append(expert)

    @rule(expert=EXPERTS)
    def remove(self, expert):
        if expert in self.order:
            self.policy.removed(expert)
            self.order.remove(expert)

    @rule(granted=st.sets(EXPERTS))
    def evict(self, granted):
        victim = self.policy.victim(lambda e: e not in granted)
        assert victim == next((e for e in self.order if e not in granted), None)
        if victim is not None:
            self.policy.removed(victim)
            self.order.remove(victim)

    @invariant()
    def sizes_agree(self):
        assert len(self.policy) == len(self.order)
        assert self.policy.victim(lambda _: True) == (self.order[0] if self.order else None)


TestLruAgainstAList = LruAgainstAList.TestCase
TestLruAgainstAList.settings = settings(max_examples=40, deadline=None)


def test_lru_asks_for_as_many_experts_as_it_must_skip_and_no_more():
    policy = Lru()
    for expert in range(10_000):
        policy.inserted(expert)
    asked = []
    assert policy.victim(lambda e: asked.append(e) or e == 2) == 2
    assert asked == [0, 1, 2]


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="'belady'") as caught:
        make_policy("belady")
    assert all(name in caught.value.hint for name in POLICIES)
