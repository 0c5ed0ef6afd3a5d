"""The sum behind `--ram`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import UsageError
from tierd.memory_limits import GroupLimit, HostMemory
from tierd.service.budget import DaemonFacts, choose_ram, fixed_items, plan_budget

MIB, GIB = 1 << 20, 1 << 30
FACTS = DaemonFacts(experts=64, slot_bytes=MIB, top_k=2, spares=3, max_sessions=4)
HOST = HostMemory(total=64 * GIB, available=60 * GIB)


def chosen(text, *groups, dense=GIB, host=HOST):
    return choose_ram(text, host, groups, dense_bytes=dense)


def least(facts=FACTS):
    return sum(item.nbytes for item in fixed_items(facts)) + facts.top_k * facts.slot_bytes


@given(st.integers(0, 400 * MIB))
def test_the_sum_is_the_budget_or_less_and_one_more_expert_would_not_fit(extra):
    ram = least() + extra
    budget = plan_budget(ram, FACTS)
    total = sum(item.nbytes for item in budget.items)
    assert total <= ram
    assert FACTS.top_k <= budget.slots <= FACTS.experts
    assert budget.slots == FACTS.experts or total + FACTS.slot_bytes > ram
    assert budget.items[:-1] == fixed_items(FACTS)
    assert budget.items[-1].nbytes == budget.slots * FACTS.slot_bytes


def test_a_budget_below_the_minimum_is_refused_with_the_figure_that_is_needed():
    needed = least()
    assert plan_budget(needed, FACTS).slots == FACTS.top_k
    with pytest.raises(UsageError, match=f"at least {needed} bytes") as caught:
        plan_budget(needed - 1, FACTS)
    assert caught.value.exit_code == 2


def test_more_sessions_experts_and_spares_leave_fewer_slots():
    ram = least() + 30 * MIB
    for change in ({"max_sessions": 64}, {"spares": 9}, {"slot_bytes": 2 * MIB}):
        facts = DaemonFacts(
            **{name: getattr(FACTS, name) for name in ("experts", "slot_bytes", "top_k", "spares", "max_sessions")}
            | change
        )
        assert plan_budget(ram, facts).slots < plan_budget(ram, FACTS).slots


def test_auto_on_a_host_leaves_a_reserve_and_a_compute_node():
    choice = chosen("auto")
    assert choice.nbytes == 60 * GIB - int(6.4 * GIB) - GIB - 384 * MIB
    assert "compute node" in choice.lines[0]
    assert "least" in choice.lines[-1]


def test_auto_takes_the_tightest_group_and_says_which():
    outer = GroupLimit("/g/memory.max", 8 * GIB, 0)
    inner = GroupLimit("/g/a/memory.max", 90 * GIB, 0)
    crowded = GroupLimit("/g/b/memory.max", 10 * GIB, 6 * GIB)
    assert chosen("AUTO ", inner, outer).nbytes == 8 * GIB - int(0.4 * GIB)
    choice = chosen("auto", inner, outer, crowded)
    assert choice.nbytes == 10 * GIB - 6 * GIB - int(0.5 * GIB)
    assert sum("/memory.max" in line for line in choice.lines) == 3


def test_auto_inside_a_small_group_stays_below_its_limit():
    limit = GroupLimit("/memory.max", 256 * MIB, 10 * MIB)
    assert 200 * MIB < chosen("auto", limit).nbytes < 246 * MIB


def test_auto_on_a_full_host_is_nothing_and_never_negative():
    assert chosen("auto", host=HostMemory(4 * GIB, 100 * MIB)).nbytes == 0
    assert chosen("auto", GroupLimit("x", 5, 900)).nbytes == 0


def test_a_share_is_of_what_this_process_may_have():
    assert chosen("50%").nbytes == 32 * GIB
    assert chosen("50%", GroupLimit("/memory.max", 8 * GIB, 0)).nbytes == 4 * GIB
    assert chosen("12GiB").nbytes == 12 * GIB


@pytest.mark.parametrize("text", ["65GiB", "0%", "101%", "lots", "-1", "", "autos"])
def test_what_cannot_be_is_refused(text):
    with pytest.raises(UsageError, match="--ram"):
        chosen(text)


def test_more_than_the_group_allows_is_refused_by_name():
    with pytest.raises(UsageError, match=r"/g/memory\.max"):
        chosen("9GiB", GroupLimit("/g/memory.max", 8 * GIB, 0))


def test_a_plan_may_be_for_another_machine_and_says_so():
    group = GroupLimit("/g/memory.max", 8 * GIB, 0)
    choice = choose_ram("96GiB", HOST, [group], dense_bytes=GIB, elsewhere=True)
    assert choice.nbytes == 96 * GIB
    assert "/g/memory.max" in choice.lines[0]
    assert "another machine" in choice.lines[0]
