"""Measures how soon a restarted daemon is as useful as it was: 256 experts of 3 MiB, a quarter of them in RAM.

    python tests/bench/warm_restart.py [--rounds 5] [--dir DIR] [--json]

A node uses experts as unevenly as routers do. The daemon is stopped and started again, and the node goes on at once.
What counts is the time from the daemon's first answer until nine tenths of the former hit rate are reached over ten
steps, and until the warm start has read all it wants, beside what the drive needs for those bytes at its probe's speed.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tierd.client.arena_source import ArenaSource
from tierd.client.daemon_stats import fetch_stats, stats_object
from tierd.client.loop_thread import LoopThread
from tierd.client.private_daemon import PrivateDaemon
from tierd.client.source import Phase
from tierd.store.store import ExpertStore
from tierd.store.synthetic import make_store

LAYERS, EXPERTS, TOP_K, RECORD_BYTES = 4, 64, 8, 3 << 20
STEPS, WINDOW, MOST_STEPS = 150, 10, 2000
SHARE, MOST_RATIO = 0.9, 1.5


class Node:
    """Uses experts of every layer, step after step: popularity falls with the rank, and each layer has its order."""

    def __init__(self, daemon: PrivateDaemon, store: ExpertStore, seed: int) -> None:
        self.source = ArenaSource(daemon.address, store, name="bench", numerics="none", kernel_path="none")
        self._chance = np.random.default_rng(seed)
        weights = 1.0 / np.arange(1, EXPERTS + 1) ** 1.5
        self._weights = weights / weights.sum()
        self._orders = [np.random.default_rng(layer).permutation(EXPERTS) for layer in range(LAYERS)]
        self._step = 0

    def step(self) -> float:
        """One step; the share of its experts that were in RAM."""
        self._step += 1
        before = self.source.stats.outcomes["hit"]
        for layer, order in enumerate(self._orders):
            ranks = self._chance.choice(EXPERTS, TOP_K, replace=False, p=self._weights)
            experts = order[ranks].tolist()
            self.source.visit(layer, experts, lambda *_: None, step=self._step, phase=Phase.DECODE)
        return float(self.source.stats.outcomes["hit"] - before) / (LAYERS * TOP_K)


def stats(daemon: PrivateDaemon) -> dict[str, Any]:
    """The daemon's statistics."""
    return stats_object(LoopThread.shared().run(fetch_stats(daemon.address), seconds=10.0, what="statistics"))


def measure(store: ExpertStore, folder: Path, seed: int) -> dict[str, float]:
    """One stop and start."""
    options = ("--arena", "25%", "--history", "on", "--state-dir", str(folder), "--http", "off", "--log-level", "error")
    daemon = PrivateDaemon(store.path, *options)
    node = Node(daemon, store, seed)
    rates = [node.step() for _ in range(STEPS)]
    former = statistics.fmean(rates[-3 * WINDOW :])
    node.source.close()
    daemon.stop()
    daemon = PrivateDaemon(store.path, *options)
    began = time.monotonic()
    first = stats(daemon)
    node = Node(daemon, store, seed + 1)
    recent: list[float] = []
    while len(recent) < MOST_STEPS:
        recent.append(node.step())
        if len(recent) >= WINDOW and statistics.fmean(recent[-WINDOW:]) >= SHARE * former:
            break
    reached = time.monotonic() - began
    while (history := stats(daemon)["history"])["warm_left"]:
        time.sleep(0.002)
    read = time.monotonic() - began
    node.source.close()
    daemon.stop()
    wanted = history["warm_wanted"] * RECORD_BYTES
    drive = wanted / first["drives"][0]["bandwidth"]
    return {
        "former_hit_rate": former, "seconds": reached, "warm_seconds": read, "drive_seconds": drive,
        "ratio": reached / drive, "hot_bytes": wanted,
    }  # fmt: skip


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where the store of 0.8 GB is made.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure, print, and exit 1 if it takes longer than 1.5 times what the drive needs."""
    with tempfile.TemporaryDirectory(prefix="tierd-warm-", dir=folder) as path:
        store = make_store(
            Path(path) / "store", layers=LAYERS, experts=EXPERTS, top_k=TOP_K, record_bytes=RECORD_BYTES
        )  # fmt: skip
        found = [measure(store, Path(path) / f"state{number}", 2 * number) for number in range(rounds)]
    ratio = statistics.median(one["ratio"] for one in found)
    if as_json:
        print(json.dumps({"ratio": ratio, "rounds": found}))
    else:
        print("hit rate before  reached again  warm start read all  drive alone  ratio")
        for one in found:
            print(
                f"{one['former_hit_rate']:15.1%}  {one['seconds']:11.3f} s  {one['warm_seconds']:17.3f} s  "
                f"{one['drive_seconds']:9.3f} s  {one['ratio']:5.2f}"
            )
    sys.exit(ratio > MOST_RATIO)


if __name__ == "__main__":
    typer.run(main)
