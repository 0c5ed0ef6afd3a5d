"""What prefetch gains and what it can cost: a real geometry, given routes, a drive as slow as it is told to be.

The throttle stands before the machine's own drive, whose direct reads cost little processor time. A copy in memory is
faster, but a core copies each record then, in about the time that the throttle would take for it: what would be timed
is that core. One core is left to the daemon.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node.bench.dense_view import DenseView
from compute_node.bench.drawn_hints import DrawnHints, Foreseen
from compute_node.bench.forced_routes import force_routes
from compute_node.bench.quiet import Quiet, processor_seconds
from compute_node.bench.token_walk import TokenWalk
from compute_node.engine.kernel_path import kernel_path
from compute_node.engine.model import Model, ModelOptions
from tierd.client.arena_source import ArenaSource
from tierd.client.daemon_stats import DaemonStats, fetch_stats
from tierd.client.loop_thread import LoopThread
from tierd.client.private_daemon import PrivateDaemon
from tierd.client.source import Phase
from tierd.errors import TierdError, UsageError
from tierd.policy.drawn_routes import RECORDED
from tierd.prefetch.throttle import Throttle
from tierd.sizes import format_bytes
from tierd.store.store import ExpertStore

__all__ = ["CASES", "check_cases", "in_memory", "measure_speed", "spare_core"]

_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a directory in memory is wanted, and the files lie in a new folder
_SPARE: Final = 2
"""Memory must have room for so many times what the bench puts there."""
_SETTLING: Final = 8
"""Runs with hints before it counts, in which throttles find their level: they try others often at first."""
_PACING: Final = 2
"""Runs that find what a node computes and lacks at a drive's pace."""
_NUMERICS: Final = "fast"
_CALL_SECONDS: Final = 30.0
_RESIDENT: Final = "everything resident"


@dataclass(frozen=True, slots=True)
class _Case:
    """How hard it is made for prefetch.

    Attributes:
        ratio: seconds in which the drive reads a token's misses over those in which the node computes the token, both
            without hints.
        right: whether hints are right as often as measured, or never.
    """

    ratio: float
    right: bool = True


CASES: Final = {
    "0.5": _Case(0.5),
    "1": _Case(1.0),
    "2": _Case(2.0),
    "wrong hints": _Case(1.0, right=False),
    "saturated drive": _Case(4.0),
    _RESIDENT: _Case(1.0),
}
"""By name; those named by a number are what prefetch is for, with its first three and without the third it may cost."""

_GAINS: Final = ("0.5", "1", "2")
_COSTS: Final = ("0.5", "wrong hints", "saturated drive", _RESIDENT)


@dataclass(frozen=True, slots=True)
class _Run:
    """One run over all tokens: seconds per token in all and computing, misses per token, hash of all logits."""

    seconds: float
    compute: float
    missed: float
    logits: str

    def rate(self, record: int, ratio: float) -> float:
        """Bytes per second at which reading what it missed takes `ratio` of what it computed."""
        return max(0.01, self.missed) * record / (ratio * self.compute)


class _Bench:
    """One daemon with a drive of one speed, and one model on it."""

    def __init__(
        self,
        stack: ExitStack,
        view: DenseView,
        folder: Path,
        routes: NDArray[np.int32],
        *,
        arena: str,
        rate: float | None,
        threads: int | None,
    ) -> None:
        options = ["--arena", arena, "--http", "off", "--log-level", "warning", "--history", "off"]
        if rate is not None:
            plan = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierd-bench-"))) / "throttle.json"
            plan.write_text(json.dumps({"throttle": [{"bytes_per_second": rate}]}))
            options += ["--fault-plan", str(plan)]
        daemon = PrivateDaemon(folder, *options)
        stack.callback(daemon.stop)
        self.daemon = daemon.pid
        self.address = daemon.address
        self.source = ArenaSource(
            daemon.address, view, name="bench", numerics=_NUMERICS, kernel_path=kernel_path(), gone=daemon.gone
        )
        stack.callback(self.source.close)
        how = ModelOptions(numerics=_NUMERICS, context=len(routes) + 1, threads=threads)
        self.model = stack.enter_context(Model(self.source, how, adapt=lambda program: force_routes(program, routes)))
        self._tokens = len(routes)

    def hinted(self) -> dict[str, int]:
        """What became of hinted experts since the daemon started."""
        counts = self._stats().prefetch
        ended = {name: int(getattr(counts, name).experts) for name in ("used", "late", "wasted", "cancelled")}
        return ended | {f"dropped: {why}": int(tally.experts) for why, tally in counts.dropped.items()}

    def reads(self) -> int:
        """Records that the daemon's drives delivered since it started."""
        return sum(int(drive.reads) for drive in self._stats().drives)

    def _stats(self) -> DaemonStats:
        fetching = fetch_stats(self.address)
        return LoopThread.shared().run(fetching, seconds=_CALL_SECONDS, what="the daemon's counts")

    def reading_rate(self) -> float:
        """Bytes per second at which the daemon delivers whole layers to a node that computes nothing."""
        geometry, stats = self.source.store.manifest.geometry, self.source.stats
        begun, missed = time.perf_counter(), stats.outcomes["miss"]
        for entry in geometry.layers:
            self.source.visit(entry.layer, range(entry.experts), _look, step=0, phase=Phase.PREFILL)
        read = (stats.outcomes["miss"] - missed) * geometry.slot_bytes
        return read / (time.perf_counter() - begun)

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


def _look(expert: int, address: int) -> None:
    """What a node would compute; here nothing."""
    del expert, address


@contextmanager
def in_memory(store: ExpertStore) -> Iterator[ExpertStore]:
    """A copy of the store in memory while the context lasts; UsageError where there is no room for one."""
    size = sum(file.stat().st_size for file in store.path.iterdir())
    try:
        free = shutil.disk_usage(_MEMORY).free
    except OSError:
        free = 0
    if free < _SPARE * size:
        raise UsageError(
            f"the store of the bench takes {format_bytes(size)} and {_MEMORY} has {format_bytes(free)} left",
            hint="Leave out --memory, or give fewer --layers.",
        )
    with tempfile.TemporaryDirectory(dir=_MEMORY, prefix="tierd-bench-") as folder:
        yield ExpertStore.open(shutil.copytree(store.path, Path(folder) / "store"))


def spare_core() -> int:
    """Threads that leave a core to the daemon, at least one."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def check_cases(names: Sequence[str]) -> None:
    """UsageError if one of them is unknown."""
    for name in names:
        if name not in CASES:
            raise UsageError(f"unknown case {name!r}", hint=f"Known: {', '.join(CASES)}.")


def measure_speed(
    view: DenseView,
    folder: Path,
    foreseen: Foreseen,
    *,
    arena: str,
    tokens: int,
    rounds: int,
    threads: int | None,
    cases: Sequence[str],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Runs with and without hints, alternating; every case has a daemon of its own.

    Args:
        view: the store of a real geometry.
        folder: where it lies.
        foreseen: what hints name, and how often they are right.
        arena: RAM for experts.
        tokens: of a run; positions of the routes.
        rounds: runs of each side.
        threads: native threads.
        cases: keys of `CASES`, at least one.
        tell: takes a line when something begins.

    Raises:
        TierdError: two runs did not compute the same logits.
    """
    sizes = view.manifest.geometry
    count, chosen = sizes.layers[0].experts, sizes.top_k
    layers = [entry.layer for entry in sizes.layers]
    routes = RECORDED.generate(tokens=tokens, layers=len(layers), experts=count, top_k=chosen)

    def bench(stack: ExitStack, share: str, rate: float | None) -> _Bench:
        return _Bench(stack, view, folder, routes, arena=share, rate=rate, threads=threads)

    tell("what a token computes with all experts in RAM, and what it computes and misses otherwise")
    with ExitStack() as stack:
        resident = bench(stack, "100%", None)
        computing = [resident.run(None) for _ in range(3)][1:]
    with ExitStack() as stack:
        missing = bench(stack, arena, None)
        unbounded = _typical(missing)
        possible = max(missing.reading_rate() for _ in range(2))
    found: dict[str, dict[str, Any]] = {}
    for name in cases:
        case = CASES[name]
        tell(f"reads take {name} of compute" if name in _GAINS else name)
        rate = unbounded.rate(sizes.slot_bytes, case.ratio)
        if name != _RESIDENT:
            # A node that waits longer computes longer, too: its core falls asleep, its caches are somebody else's.
            with ExitStack() as stack:
                rate = _typical(bench(stack, arena, rate)).rate(sizes.slot_bytes, case.ratio)
        with ExitStack() as stack:
            part = bench(stack, "100%" if name == _RESIDENT else arena, rate)
            hints = DrawnHints(
                part.source,
                layers,
                count,
                routes,
                foreseen,
                right=case.right,
                throttle=Throttle(),
                lead_seconds=2 * (1 + case.ratio) * unbounded.compute / len(layers),
            )
            found[name] = _compare(part, hints, rate, sizes.slot_bytes, rounds)
    digests = {run for case in found.values() for run in case["logits"]} | {run.logits for run in computing}
    if len(digests) != 1:
        raise TierdError("runs computed different logits", hint="This is a defect; please report it.")
    costs = [found[name]["speedup"] for name in _COSTS if name in found]
    return {
        "speedup": {name: found[name]["speedup"] for name in _GAINS if name in found},
        "hidden_share": {name: found[name]["hidden_share"] for name in _GAINS if name in found},
        "worst_case_ratio": min(costs) if costs else None,
        "identical": True,
        "cases": found,
        "resident_seconds_per_token": min(run.seconds for run in computing),
        "compute_seconds_per_token": unbounded.compute,
        "misses_per_token": unbounded.missed,
        "tokens": tokens,
        "rounds": rounds,
        "threads": resident.model.threads,
        "foreign_cpu_share": max(case["foreign_cpu_share"] for case in found.values()),
        # A throttle that is wider than what reads take anyway is none.
        "reads_per_second_possible": possible / sizes.slot_bytes,
        "too_slow": [name for name, case in found.items() if case["bytes_per_second"] > possible],
        "void": any(case["void"] for case in found.values()),
    }


def _typical(bench: _Bench) -> _Run:
    """A run without hints, when RAM holds what it holds from then on."""
    return [bench.run(None) for _ in range(_PACING)][-1]


def _compare(bench: _Bench, hints: DrawnHints, rate: float, record: int, rounds: int) -> dict[str, Any]:
    """Runs of both sides in turns, after such that do not count."""
    sides: dict[str, list[_Run]] = {"off": [], "on": []}
    bench.run(None)
    for _ in range(_SETTLING):
        bench.run(hints)
    quiet, hinted = Quiet(beside=[bench.daemon]), bench.hinted()
    begun, read = processor_seconds(bench.daemon), bench.reads()
    with quiet:
        for number in range(rounds):
            # The order turns round, so that a drift of the machine touches both alike.
            for name in ("off", "on") if number % 2 == 0 else ("on", "off"):
                sides[name].append(bench.run(hints if name == "on" else None))
    begun, read = processor_seconds(bench.daemon) - begun, bench.reads() - read
    off, on = (statistics.median(run.seconds for run in sides[name]) for name in ("off", "on"))
    compute = statistics.median(run.compute for run in sides["off"])
    reads = statistics.median(run.missed for run in sides["off"]) * record / rate
    hideable = off - max(compute, reads)
    return {
        "speedup": off / on,
        "hidden_share": (off - on) / hideable if hideable > 0 else 0.0,
        "hideable_seconds_per_token": hideable,
        "reads_to_compute": reads / compute if compute > 0 else 0.0,
        "off_seconds_per_token": [run.seconds for run in sides["off"]],
        "on_seconds_per_token": [run.seconds for run in sides["on"]],
        "off_computing_per_token": [run.compute for run in sides["off"]],
        "on_computing_per_token": [run.compute for run in sides["on"]],
        "off_misses_per_token": [run.missed for run in sides["off"]],
        "on_misses_per_token": [run.missed for run in sides["on"]],
        "bytes_per_second": rate,
        "daemon_processor_seconds_per_read": begun / read if read else None,
        "hinted": {name: count - hinted[name] for name, count in bench.hinted().items()},
        "throttle_level": hints.throttle.level,
        "logits": [run.logits for side in sides.values() for run in side],
        **quiet.report(),
    }
