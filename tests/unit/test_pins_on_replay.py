"""Why there are no automatic pins: what they would have done to the policy, on the fixed traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tierd.policy.decayed_frequency import DecayedFrequency
from tierd.policy.pins import PinnedPolicy
from tierd.policy.replay import ReplayArena, replay, slots_of
from tierd.policy.trace import load_trace

TRACES = Path(__file__).parent.parent / "bench" / "traces"
TOKENS = 600


@pytest.fixture(scope="module")
def misses():
    """Misses by percent of residency, then by share of the arena that is pinned, of a policy that knows the history."""
    train, held = load_trace(TRACES / "train.npz"), load_trace(TRACES / "held.npz").head(TOKENS)
    uses = np.bincount(train.flat().ravel(), minlength=train.experts_total)
    hottest = np.argsort(-uses, kind="stable").tolist()
    found = {}
    for percent in (25, 50):
        slots, arenas = slots_of(held, percent), {}
        for share in (0.0, 0.25, 0.5):
            inner = DecayedFrequency()
            inner.recall(uses / len(train))
            policy = PinnedPolicy(inner)
            policy.pin(hottest[: int(share * slots)])
            arenas[share] = ReplayArena(policy, slots)
        replay(held, list(arenas.values()))
        found[percent] = {share: arena.total.misses for share, arena in arenas.items()}
    return found


@pytest.mark.parametrize("percent", [25, 50])
def test_pins_of_the_hottest_save_a_policy_that_recalls_them_nothing(misses, percent):
    of = misses[percent]
    assert of[0.25] > 0.995 * of[0.0]
    assert of[0.5] > of[0.0]


def test_pins_of_half_the_arena_cost_it_much(misses):
    assert misses[50][0.5] > 1.05 * misses[50][0.0]
