"""Run simulated histories from the command line, or replay one and see its events."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulation.scenarios import SCENARIOS
from simulation.world import SimulationFailure, World, simulate


def main() -> int:
    """Return 0 if every history was right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help="one kind of world; all without it")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, one after another")
    parser.add_argument("--events", action="store_true", help="print what happened")
    options = parser.parse_args()
    scenarios = [options.scenario] if options.scenario else sorted(SCENARIOS)
    began, events = time.perf_counter(), 0
    for seed in range(options.seed, options.seed + options.seeds):
        for scenario in scenarios:
            try:
                world = simulate(scenario, seed)
            except SimulationFailure as failure:
                print(failure, file=sys.stderr)
                return 1
            events += len(world.events)
            if options.events:
                show(world)
    histories = options.seeds * len(scenarios)
    print(f"{histories} histories with {events} events were right, in {time.perf_counter() - began:.1f} s")
    return 0


def show(world: World) -> None:
    """Print a history."""
    print(f"{world.seed}: {world.digest()}")
    for moment, *facts in world.events:
        print(f"{moment:12.6f}  {' '.join(map(str, facts))}")


if __name__ == "__main__":
    sys.exit(main())
