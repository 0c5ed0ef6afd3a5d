"""Hints are worth what came true of the ones before, and no more than they claim."""

from __future__ import annotations

import pytest

from tierd.prefetch.hint_trust import HintTrust

NAMED = (10, 11, 12, 13)


def worth(trust: HintTrust, claimed: float, step: int = 0) -> float:
    return trust.hint(step, 1, NAMED, [claimed] * len(NAMED))[0]


def told(trust: HintTrust, claimed: float, right: int, steps: int = 200) -> float:
    """What such hints are worth after some of which so many of four came true."""
    for step in range(steps):
        worth(trust, claimed, step)
        trust.reached(step, 1, NAMED[:right])
    return worth(trust, claimed, steps)


def test_at_first_a_hint_is_worth_what_it_claims() -> None:
    assert worth(HintTrust(), 0.7) == pytest.approx(0.7)


@pytest.mark.parametrize(("claimed", "right", "expected"), [(0.9, 0, 0.0), (0.9, 2, 0.5), (0.5, 2, 0.5), (0.2, 4, 0.2)])
def test_after_many_it_is_worth_what_came_true_of_such_ones(claimed: float, right: int, expected: float) -> None:
    assert told(HintTrust(), claimed, right) == pytest.approx(expected, abs=0.03)


def test_claims_of_another_size_are_judged_by_themselves() -> None:
    trust = HintTrust()
    told(trust, 0.9, 0)
    assert worth(trust, 0.3) == pytest.approx(0.3)


def test_hints_that_became_better_are_believed_again() -> None:
    trust = HintTrust()
    assert told(trust, 0.9, 0) < 0.05
    assert told(trust, 0.9, 4, steps=1500) > 0.6


def test_layers_that_never_come_are_forgotten() -> None:
    trust = HintTrust()
    for step in range(1000):
        worth(trust, 0.9, step)
    assert len(trust._open) == 64
    trust.reached(5, 1, NAMED)
    assert worth(trust, 0.9, 5) == pytest.approx(0.9)
