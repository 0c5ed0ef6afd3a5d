"""Two nodes on one daemon, beside one node with all of their work; and what the death of one costs the other."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from compute_node.bench.arena_share import arena_share
from compute_node.bench.child import Child
from compute_node.bench.geometries import BenchGeometry
from compute_node.bench.quiet import Quiet
from compute_node.bench.random_store import random_store
from compute_node.engine.cores import default_threads
from compute_node.models.registry import family_of
from tierd.client.daemon_stats import fetch_stats
from tierd.client.loop_thread import LoopThread
from tierd.client.private_daemon import PrivateDaemon

__all__ = ["measure_near"]

_PROMPT = 12
_STATS_SECONDS = 10.0


def measure_near(
    geometry: BenchGeometry,
    *,
    layers: int,
    arena: str,
    numerics: str,
    batch: int,
    rounds: int,
    tokens: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """One node decodes two batches, two nodes one each, in turn; all cores are shared out among them.

    Args:
        geometry: of a model of random weights.
        layers: of it.
        arena: of the daemon: an amount or a share.
        numerics: of the kernels.
        batch: sequences of each of the two nodes; the one node has twice as many.
        rounds: turns of each side.
        tokens: of an answer.
        tell: takes a line when something begins.

    Returns:
        `sum_tokens_per_second` of the two, `solo_tokens_per_second` of the one, `sum_share`, whether all answers are
        `identical`, those of the survivor too after the other one was killed (`survivor_identical`), and RAM: what
        each node has for itself, and `arena_shares`, by process, of the one copy of the experts.
    """
    _, sizes = family_of(geometry.cut(layers))
    generator = np.random.Generator(np.random.Philox(3))
    prompts = generator.integers(0, sizes.vocab_size, (2 * batch, _PROMPT)).tolist()
    cores = default_threads()
    with ExitStack() as stack:
        quiet = stack.enter_context(Quiet(children=True))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierd-near-")))
        tell("the store, which is made at the first run")
        store = random_store(geometry, layers=layers)
        daemon = PrivateDaemon(store.path, "--arena", arena, "--http", "off", "--log-level", "warning")
        stack.callback(daemon.stop)

        def node(name: str, own: list[list[int]], threads: int) -> Child:
            tell(f"starting the node {name}")
            options = {
                "store": str(daemon.address), "numerics": numerics, "threads": threads, "prompts": own,
                "tokens": tokens,
            }  # fmt: skip
            command = [sys.executable, "-m", "compute_node.bench.near_node", json.dumps(options)]
            child = Child(name, command, scratch / f"{name}.log")
            stack.callback(child.end)
            child.wait_for("ready")
            return child

        solo = node("solo", prompts, cores)
        pair = [
            node(name, own, max(1, cores // 2))
            for name, own in (("first", prompts[:batch]), ("second", prompts[batch:]))
        ]
        solos: list[dict[str, Any]] = []
        pairs: list[dict[str, Any]] = []
        for number in range(rounds + 1):
            tell(f"turn {number} of {rounds}" if number else "filling the arena")
            one = solo.ask("")
            begun = time.perf_counter()
            for child in pair:
                child.say("")
            two = [child.answer() for child in pair]
            seconds = time.perf_counter() - begun
            if number:
                solos.append(one)
                pairs.append({"seconds": seconds, "nodes": two})
        processes = {"daemon": daemon.pid, "solo": solo.pid, "first": pair[0].pid, "second": pair[1].pid}
        shares = {name: arena_share(pid) for name, pid in processes.items()}
        tell("killing one")
        for child in pair:
            child.say("")
        pair[0].kill()
        survivor = pair[1].answer()
        counted = LoopThread.shared().run(fetch_stats(daemon.address), seconds=_STATS_SECONDS, what="the counts")
    made = 2 * batch * tokens
    expected = solos[0]["answers"]
    said = [one["answers"] for one in solos] + [[a for n in two["nodes"] for a in n["answers"]] for two in pairs]
    alone = made / float(np.median([one["seconds"] for one in solos]))
    together = made / float(np.median([two["seconds"] for two in pairs]))
    return quiet.report() | {
        "geometry": geometry.name,
        "layers": layers,
        "identical": all(answers == expected for answers in said),
        "survivor_identical": survivor["answers"] == expected[batch:],
        "sum_tokens_per_second": together,
        "solo_tokens_per_second": alone,
        "sum_share": together / alone,
        "arena_bytes": counted.arena.bytes,
        "arena_shares": shares,
        "node_private_bytes": [node["private_bytes"] for node in pairs[-1]["nodes"]],
        "batch": batch,
        "tokens": tokens,
        "solo": [one["seconds"] for one in solos],
        "pair": [two["seconds"] for two in pairs],
    }
