from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from simulation.drive import DriveHabits
from simulation.mutants import MUTANTS, Replacement
from simulation.node import Node, NodeHabits
from simulation.reader import UnlockedReader
from simulation.scenarios import SCENARIOS, Scenario
from simulation.world import SimulationFailure, World, simulate

from tierd.prefetch.hint import Hint

RUN = Path(__file__).with_name("run.py")
SEEDS = 210
BLOCKS = 2
SOAK_SEEDS = 1_000


def histories() -> Iterator[tuple[str, int]]:
    """All scenarios with seed 0, then with seed 1, and so on."""
    return ((scenario, seed) for seed in range(SEEDS) for scenario in sorted(SCENARIOS))


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_every_history_keeps_every_invariant(scenario: str, block: int) -> None:
    first, last = (n * SEEDS // BLOCKS for n in (block, block + 1))
    for seed in range(first, last):
        reached(scenario, seed)


@pytest.mark.soak
@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_histories_that_nobody_has_seen_keep_every_invariant(scenario: str) -> None:
    first = int.from_bytes(os.urandom(6), "little")
    simulate_all((scenario, seed) for seed in range(first, first + SOAK_SEEDS))


@cache
def reached(scenario: str, seed: int) -> Counter[str]:
    """How often what happened in a history; it keeps every invariant."""
    world = simulate(scenario, seed)
    counts = Counter(str(event[1]) for event in world.events)
    total = world.broker.stats.total()
    for name in ("hits", "misses", "joined", "cancelled", "failed"):
        counts[name] += getattr(total, name)
    counts["repeated"] += world.broker.stats.repeated
    counts["evictions"] += world.broker.stats.evictions
    for event in world.events:
        if event[1] == "answer":
            counts.update(reason.value for _, reason in event[5])  # type: ignore[attr-defined]
        if event[1] == "returned":
            counts[str(event[5])] += 1
    counts["died"] += sum(event[1] == "close" and event[3] == "died" for event in world.events)
    for actor in world.actors:
        if isinstance(actor, UnlockedReader):
            counts["kept"] += actor.kept
            counts["discarded"] += actor.discarded
    for drive in world.drives:
        for name in ("retries", "stalls", "failovers"):
            counts[name] += getattr(drive.stats, name)
    return counts


def test_the_histories_reach_what_they_are_meant_to_reach() -> None:
    counts: Counter[str] = Counter()
    for scenario, seed in islice(histories(), 380):
        counts.update(reached(scenario, seed))
    wanted = {
        *("hits", "misses", "joined", "cancelled", "failed", "repeated", "evictions"),
        *("acquire", "release", "cancel", "close", "died", "greedy", "stale", "kept", "discarded"),
        *("data_loss", "unavailable", "deadline_exceeded", "DriveError", "ChecksumMismatch"),
        *("retries", "stalls", "failovers", "withdrawn", "stays", "leaves", "left", "joins", "stop"),
    }
    assert {name: counts[name] for name in wanted if counts[name] < 10} == {}


def test_reads_that_are_rarely_late_are_hedged_and_nothing_fails() -> None:
    drives = (DriveHabits(workers=3, fastest=4, slowest=8, hang=0.008, hang_seconds=0.4),) * 2
    node = NodeHabits(steps=150, top_k=3, deadline=(6144, 6144))
    scenario = Scenario(2, 8, 4, 3, (node,), drives, replicated=True, must_serve=True, spares=3)
    won = 0
    for seed in range(6):
        world = World(scenario, f"late reads {seed}")
        world.run()
        won += sum(drive.stats.hedges_won for drive in world.drives)
    assert won > 0


def test_the_same_seed_gives_the_same_history() -> None:
    for scenario, seed in islice(histories(), 20):
        assert simulate(scenario, seed).digest() == simulate(scenario, seed).digest()
    assert simulate("steady", 1).digest() != simulate("steady", 2).digest()


def test_a_history_is_the_same_in_another_process_with_other_hashes() -> None:
    scenario, seed = "rude-nodes", 11
    command = [sys.executable, str(RUN), "--scenario", scenario, "--seed", str(seed), "--events"]
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[0] == f"{scenario}/{seed}: {simulate(scenario, seed).digest()}"


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(MUTANTS[name], monkeypatch)
    with pytest.raises(SimulationFailure, match=r"Replay: python tests/simulation/run.py --scenario \S+ --seed \d+"):
        simulate_all(islice(histories(), 140))


def test_a_failure_says_how_to_replay_it_and_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(MUTANTS["an expert is published in spite of its checksum"], monkeypatch)
    told = []
    for _ in range(2):
        with pytest.raises(SimulationFailure, match=r"wrong bytes of expert \d+") as caught:
            simulate_all(("sick-drive", seed) for seed in range(100))
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert told[0].splitlines()[-1].startswith("Replay: python tests/simulation/run.py --scenario sick-drive --seed ")


def test_a_world_takes_any_actor_and_more_nodes_while_it_runs() -> None:
    class Latecomer:
        def __init__(self, world: World) -> None:
            self.world = world
            self.finished = False

        def start(self) -> None:
            self.world.clock.call_later(1.0, self.come)
            self.world.broker.hint(1, Hint(0, 0, (9, 10)))

        def come(self) -> None:
            self.world.add_node(NodeHabits(steps=3))
            self.finished = True

    world = World(Scenario(2, 4, slots=2, most=2, nodes=(NodeHabits(steps=1),)), "latecomer")
    world.add(Latecomer(world))
    world.run()
    assert [actor.id for actor in world.actors if isinstance(actor, Node)] == [1, 2]
    assert world.broker.stats.total().requests == 2 * (1 + 3)
    assert world.broker.stats.prefetch.cut == 2


def test_scenarios_vary_with_their_seed() -> None:
    for draw in SCENARIOS.values():
        assert draw(Random(1)) == draw(Random(1))
        assert len({draw(Random(seed)) for seed in range(20)}) > 10


def simulate_all(chosen: Iterable[tuple[str, int]]) -> None:
    for scenario, seed in chosen:
        simulate(scenario, seed)


def plant(replacements: list[Replacement], monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, function in replacements:
        monkeypatch.setattr(owner, name, function)
