"""One node's long prefill does not stall another's tokens, whatever the order of events."""

from __future__ import annotations

import pytest
from simulation.drive import DriveHabits
from simulation.node import NodeHabits
from simulation.scenarios import Scenario
from simulation.world import World

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
