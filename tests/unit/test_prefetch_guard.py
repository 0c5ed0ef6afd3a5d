"""Which experts count as used in this step or the last, held against a plain reckoning over all that was told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierd.prefetch.step_uses import StepUses

USES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6), st.integers(0, 9)), max_size=40)


@given(USES)
def test_the_two_newest_steps_of_each_session_count(uses):
    guard = StepUses()
    for session, step, expert in sorted(uses, key=lambda use: use[1]):
        guard.used(session, step, [expert])
    recent = set()
    for session in {use[0] for use in uses}:
        newest = sorted({step for who, step, _ in uses if who == session})[-2:]
        recent |= {expert for who, step, expert in uses if who == session and step in newest}
    assert {expert for expert in range(10) if guard.recent(expert)} == recent


def test_uses_told_late_still_count():
    guard = StepUses()
    guard.used(1, 5, [50])
    guard.used(1, 4, [40])
    guard.used(1, 4, [41])
    guard.used(1, 2, [20])
    assert [expert for expert in (20, 40, 41, 50) if guard.recent(expert)] == [40, 41, 50]
    guard.used(1, 6, [60])
    assert [expert for expert in (40, 50, 60) if guard.recent(expert)] == [50, 60]


def test_an_ended_session_guards_nothing():
    guard = StepUses()
    guard.used(1, 0, [5])
    guard.ended(1)
    guard.ended(2)
    assert not guard.recent(5)
