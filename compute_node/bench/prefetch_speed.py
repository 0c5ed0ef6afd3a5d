"""What prefetch gains and what it can cost: a real geometry, given routes, a drive as slow as it is told to be."""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node.bench.drawn_hints import DrawnHints, stretched
from compute_node.bench.forced_routes import force_routes
from compute_node.bench.quiet import Quiet
from compute_node.bench.token_walk import TokenWalk
from compute_node.engine.kernel_path import kernel_path
from compute_node.engine.model import Model, ModelOptions
from tierd.client.arena_source import ArenaSource
from tierd.client.private_daemon import PrivateDaemon
from tierd.errors import TierdError
from tierd.policy.drawn_routes import RECORDED
from tierd.prefetch.throttle import Throttle
from tierd.store.store import ExpertStore

__all__ = ["RATIOS", "measure_speed"]

RATIOS: Final = (0.5, 1.0, 2.0)
"""Seconds in which the drive reads a token's misses over those in which the node computes the token."""
_SATURATED: Final = 8.0
_NUMERICS: Final = "fast"


@dataclass(frozen=True, slots=True)
class _Run:
    """One run over all tokens: seconds per token in all and computing, misses per token, hash of all logits."""

    seconds: float
    compute: float
    missed: float
    logits: str


class _Bench:
    """One daemon with a drive of one speed, and one model on it."""

    def __init__(
        self,
        stack: ExitStack,
        store: ExpertStore,
        routes: NDArray[np.int32],
        *,
        arena: str,
        rate: float | None,
        threads: int | None,
    ) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierd-bench-")))
        options = ["--arena", arena, "--http", "off", "--log-level", "warning", "--history", "off"]
        if rate is not None:
            plan = folder / "throttle.json"
            plan.write_text(json.dumps({"throttle": [{"bytes_per_second": rate}]}))
            options += ["--fault-plan", str(plan)]
        daemon = PrivateDaemon(store.path, *options)
        stack.callback(daemon.stop)
        self.source = ArenaSource(
            daemon.address, store, name="bench", numerics=_NUMERICS, kernel_path=kernel_path(), gone=daemon.gone
        )
        stack.callback(self.source.close)
        how = ModelOptions(numerics=_NUMERICS, context=len(routes) + 1, threads=threads)
        self.model = stack.enter_context(Model(self.source, how, adapt=lambda program: force_routes(program, routes)))
        self._tokens = len(routes)

    def run(self, hints: DrawnHints | None) -> _Run:
        """The whole text once, from its beginning."""
        model, stats = self.model, self.source.stats
        model.hinting = hints
        if hints is not None:
            hints.restart()
        outcomes, times = dict(stats.outcomes), (model.times.seconds, model.times.wait_seconds)
        walk, digest = TokenWalk(model), hashlib.blake2b(digest_size=8)
        for _ in range(self._tokens):
            digest.update(walk.step().tobytes())
        walk.end()
        seconds, waited = model.times.seconds - times[0], model.times.wait_seconds - times[1]
        missed = sum(stats.outcomes[name] - outcomes[name] for name in ("miss", "joined"))
        count = self._tokens
        return _Run(seconds / count, (seconds - waited) / count, missed / count, digest.hexdigest())


def measure_speed(
    store: ExpertStore,
    precision: Sequence[float],
    *,
    arena: str,
    tokens: int,
    rounds: int,
    threads: int | None,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Runs with and without hints, alternating; every case has a daemon of its own.

    Args:
        store: of a real geometry.
        precision: how often the guess of each rank is right, for a router that chooses half as many experts.
        arena: RAM for experts.
        tokens: of a run; positions of the routes.
        rounds: runs of each side.
        threads: native threads.
        tell: takes a line when something begins.

    Raises:
        TierdError: two runs did not compute the same logits.
    """
    sizes = store.geometry
    count, chosen = sizes.layers[0].experts, sizes.top_k
    routes = RECORDED.generate(tokens=tokens, layers=len(sizes.layers), experts=count, top_k=chosen)
    ranks = stretched(precision, 2 * chosen)
    cases: dict[str, dict[str, Any]] = {}
    with Quiet() as quiet:
        with ExitStack() as stack:
            tell("how long a token computes, and what it misses")
            bench = _Bench(stack, store, routes, arena=arena, rate=None, threads=threads)
            bench.run(None)
            plain = [bench.run(None) for _ in range(rounds)]
        compute = statistics.median(run.compute for run in plain)
        missed = max(0.01, statistics.median(run.missed for run in plain))
        for name, ratio, share, right in (
            *((f"{ratio:g}", ratio, arena, True) for ratio in RATIOS),
            ("wrong hints", 1.0, arena, False),
            ("saturated drive", _SATURATED, arena, True),
            ("everything resident", None, "100%", True),
        ):
            tell(name if ratio is None or name[0].isalpha() else f"reads take {name} of compute")
            rate = None if ratio is None else missed * sizes.slot_bytes / (ratio * compute)
            with ExitStack() as stack:
                bench = _Bench(stack, store, routes, arena=share, rate=rate, threads=threads)
                hints = DrawnHints(
                    bench.source,
                    [entry.layer for entry in sizes.layers],
                    count,
                    routes,
                    ranks,
                    right=right,
                    throttle=Throttle(),
                    lead_seconds=2 * (1 + (ratio or 0)) * compute / len(sizes.layers),
                )
                cases[name] = _case(bench, hints, rate, sizes.slot_bytes, rounds)
    digests = {run for case in cases.values() for run in case["logits"]} | {run.logits for run in plain}
    if len(digests) != 1:
        raise TierdError("runs computed different logits", hint="This is a defect; please report it.")
    worst = ("0.5", "wrong hints", "saturated drive", "everything resident")
    return {
        "speedup": {f"{ratio:g}": cases[f"{ratio:g}"]["speedup"] for ratio in RATIOS},
        "hidden_share": {f"{ratio:g}": cases[f"{ratio:g}"]["hidden_share"] for ratio in RATIOS},
        "worst_case_ratio": min(cases[name]["speedup"] for name in worst),
        "identical": True,
        "cases": cases,
        "compute_seconds_per_token": compute,
        "misses_per_token": missed,
        "precision_by_rank": ranks,
        "tokens": tokens,
        "rounds": rounds,
        **quiet.report(),
    }


def _case(bench: _Bench, hints: DrawnHints, rate: float | None, record: int, rounds: int) -> dict[str, Any]:
    sides: dict[str, list[_Run]] = {"off": [], "on": []}
    for number in range(rounds + 1):
        # The order turns round, so that a drift of the machine touches both alike.
        for name in ("off", "on") if number % 2 == 0 else ("on", "off"):
            run = bench.run(hints if name == "on" else None)
            if number:
                sides[name].append(run)
    off, on = (statistics.median(run.seconds for run in sides[name]) for name in ("off", "on"))
    compute = statistics.median(run.compute for run in sides["off"])
    reads = 0.0 if rate is None else statistics.median(run.missed for run in sides["off"]) * record / rate
    hideable = off - max(compute, reads)
    return {
        "speedup": off / on,
        "hidden_share": (off - on) / hideable if hideable > 0 else 0.0,
        "reads_to_compute": reads / compute if compute > 0 else 0.0,
        "off_seconds_per_token": [run.seconds for run in sides["off"]],
        "on_seconds_per_token": [run.seconds for run in sides["on"]],
        "off_misses_per_token": [run.missed for run in sides["off"]],
        "on_misses_per_token": [run.missed for run in sides["on"]],
        "throttle_level": hints.throttle.level,
        "logits": [run.logits for side in sides.values() for run in side],
    }
