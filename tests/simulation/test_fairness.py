"""One node's long prefill does not stall another's tokens, whatever the order of events."""

from __future__ import annotations

from collections import Counter

import pytest
from simulation.drive import DriveHabits
from simulation.node import NodeHabits
from simulation.records import RECORD_BYTES
from simulation.scenarios import Scenario
from simulation.world import World

from tierd.broker.quota import NO_QUOTA, SessionQuota

PREFILLS, DECODES = 1, 2
EXPERTS, CHOSEN = 24, 3


def reads_of_each_token(seed: int) -> list[int]:
    """For each request of the decoding node, reads that ended before it had all its experts."""
    scenario = Scenario(
        layers=3,
        experts_per_layer=EXPERTS,
        slots=2 * EXPERTS,
        most=EXPERTS,
        nodes=(NodeHabits(steps=12, whole_layers=True, compute=0), NodeHabits(steps=12, top_k=CHOSEN, compute=6)),
        drives=(DriveHabits(workers=1, fastest=2, slowest=2),),
        depth=1,
    )
    world = World(scenario, f"fair/{seed}")
    world.run()
    found, lacking = [], 0
    for _, what, *facts in world.events:
        if what == "acquire" and facts[0] == DECODES:
            lacking = len(facts[3])  # type: ignore[arg-type]
            found.append(0)
        elif what == "answer" and facts[0] == DECODES:
            lacking -= len(facts[2]) + len(facts[3])  # type: ignore[arg-type]
        elif what == "returned" and lacking:
            found[-1] += 1
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_token_waits_for_few_of_anothers_reads(seed: int) -> None:
    waited = reads_of_each_token(seed)
    assert len(waited) == 12
    # Two reads are at the drive when it asks; then the two nodes take turns.
    assert max(waited) <= 2 + 2 * CHOSEN < EXPERTS


def test_without_turns_it_would_wait_for_a_whole_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierd.broker.fair_reads._PER_DEPTH", 1000)
    assert max(max(reads_of_each_token(seed)) for seed in range(8)) > 2 + 2 * CHOSEN


def most_of_each(quota: SessionQuota, seed: int) -> tuple[Counter[int], Counter[int], World]:
    """By node, the most reads at the drives at once that its turns began, and the most experts that it held at once.

    Three nodes want different layers whole, so that no read is anybody else's.
    """
    habits = NodeHabits(steps=9, whole_layers=True, compute=0)
    world = World(
        Scenario(
            layers=3,
            experts_per_layer=EXPERTS,
            slots=3 * EXPERTS,
            most=EXPERTS,
            nodes=(habits,) * 3,
            drives=(DriveHabits(workers=8, fastest=2, slowest=9),),
            depth=8,
            quota=quota,
        ),
        f"quota/{seed}",
    )
    reads: Counter[int] = Counter()
    held: Counter[int] = Counter()
    step = world.clock.step

    def watched() -> bool:
        on = step()
        for session, count in Counter(world.broker.fair._running.values()).items():
            reads[session] = max(reads[session], count)
        for session in world.broker.session_ids():
            held[session] = max(held[session], world.broker.grants(session))
        return on

    world.clock.step = watched  # type: ignore[assignment, method-assign]
    world.run()
    return reads, held, world


@pytest.mark.parametrize("seed", range(4))
def test_a_quota_bounds_what_a_node_holds_and_has_read_at_once(seed: int) -> None:
    quota = SessionQuota(experts=7, read_bytes=3 * RECORD_BYTES)
    reads, held, world = most_of_each(quota, seed)
    assert set(reads) == set(held) == {1, 2, 3}
    assert max(reads.values()) == 3
    assert max(held.values()) == 7
    assert world.broker.fair.held > 0
    # All came all the same, in smaller waves.
    assert world.broker.stats.total().failed == 0
    assert world.broker.stats.total().requests == 3 * 9 * EXPERTS


def test_without_a_quota_nodes_hold_whole_layers_and_share_the_drives_by_turns_alone() -> None:
    reads, held, world = most_of_each(NO_QUOTA, 0)
    assert max(reads.values()) > 3
    assert max(held.values()) == EXPERTS
    assert world.broker.fair.held == 0


def test_a_quota_smaller_than_a_record_lets_one_read_at_a_time_through() -> None:
    reads, _, world = most_of_each(SessionQuota(read_bytes=1), 0)
    assert set(reads.values()) == {1}
    assert world.broker.stats.total().failed == 0
