"""Policies against each other on one trace: hit rates, bytes, and the share of the way from LRU to Belady's bound."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from tierd.policy.belady import Belady
from tierd.policy.decayed_frequency import DecayedFrequency
from tierd.policy.expected_frequency import ExpectedFrequency
from tierd.policy.lru import Lru
from tierd.policy.policies import make_policy
from tierd.policy.policy import EvictionPolicy
from tierd.policy.replay import Counts, ReplayArena, count_tokens, future, replay, slots_of
from tierd.policy.token_table import TokenTable
from tierd.policy.trace import Trace

__all__ = ["COLD", "Score", "best_half_life", "compete", "gap_closed"]

COLD: Final = f"{ExpectedFrequency.name}-cold"
"""The default with empty token tables at the start, where others were counted on a training trace."""

_HALF_LIVES: Final = (8, 16, 32, 64, 128, 256, 512)
_FIRST_TRIED: Final = 3


@dataclass(frozen=True, slots=True)
class Score:
    """Counts of one policy in one arena.

    Attributes:
        policy: its name.
        percent: residency, percent of all experts.
        slots: what that is in experts.
        prefill: counts of prefill steps.
        decode: counts of decode steps.
    """

    policy: str
    percent: float
    slots: int
    prefill: Counts
    decode: Counts

    @property
    def total(self) -> Counts:
        """Both phases together."""
        return Counts(self.prefill.requests + self.decode.requests, self.prefill.hits + self.decode.hits)


@dataclass(frozen=True, slots=True)
class _Entry:
    policy: str
    percents: tuple[float, ...]
    trace: Trace
    history: Trace | None


def compete(
    trace: Trace,
    policies: Iterable[str],
    percents: Sequence[float],
    *,
    history: Trace | None = None,
    jobs: int = 0,
    tell: Callable[[str], None] = lambda _line: None,
) -> list[Score]:
    """Runs each policy over the trace, for all arena sizes at once.

    Args:
        trace: what they are judged on.
        policies: names known to `make_policy`, `belady`, or `COLD`.
        percents: arena sizes.
        history: an earlier trace; the token tables of the default are counted on it first.
        jobs: processes; 0: one per processor.
        tell: takes a line when a policy has been through.

    Raises:
        UsageError: an unknown policy, or an arena below one token's experts.
    """
    entries = [_Entry(name, tuple(percents), trace, history) for name in policies]
    for entry in entries:
        _policy(entry.policy, trace, slots_of(trace, max(percents)), known_only=True)
    for percent in percents:
        slots_of(trace, percent)
    workers = min(jobs or os.cpu_count() or 1, len(entries))
    with ExitStack() as stack:
        found: Iterable[list[Score]] = map(_run, entries)
        if workers > 1:
            context = multiprocessing.get_context("spawn")
            found = stack.enter_context(ProcessPoolExecutor(workers, mp_context=context)).map(_run, entries)
        scores = []
        for done, (entry, of_one) in enumerate(zip(entries, found, strict=True), start=1):
            tell(f"{entry.policy} on {trace.name}, {done} of {len(entries)}")
            scores += of_one
        return scores


def best_half_life(
    trace: Trace, percents: Sequence[float], *, jobs: int = 0, tell: Callable[[str], None] = lambda _line: None
) -> str:
    """The name of the decayed frequency whose half-life of 8 to 512 steps has the most hits over all arena sizes.

    The hit rate has one peak, so the search climbs from the middle to it. `tell` is as for `compete`.
    """
    hits: dict[int, float] = {}

    def measure(places: Iterable[int]) -> None:
        lives = [_HALF_LIVES[place] for place in places if 0 <= place < len(_HALF_LIVES)]
        new = [life for life in lives if life not in hits]
        names = [f"{DecayedFrequency.name}-{life}" for life in new]
        for score in compete(trace, names, percents, jobs=jobs, tell=tell):
            life = int(score.policy.rpartition("-")[2])
            hits[life] = hits.get(life, 0.0) + score.total.hit_rate

    place = _FIRST_TRIED
    while True:
        measure([place - 1, place, place + 1])
        best = _HALF_LIVES.index(max(hits, key=hits.__getitem__))
        if best == place:
            return f"{DecayedFrequency.name}-{_HALF_LIVES[best]}"
        place = best


def gap_closed(hit_rate: float, lru: float, belady: float) -> float | None:
    """0 for LRU, 1 for Belady; None where there is nothing between them."""
    return (hit_rate - lru) / (belady - lru) if belady > lru else None


def _policy(name: str, trace: Trace, slots: int, *, known_only: bool = False) -> EvictionPolicy:
    if name == Belady.name:
        return Lru() if known_only else Belady(future(trace, slots))
    return make_policy(ExpectedFrequency.name if name == COLD else name)


def _run(entry: _Entry) -> list[Score]:
    trace = entry.trace
    table = None
    if entry.policy in {ExpectedFrequency.name, COLD}:
        table = TokenTable(trace.layer_experts)
        if entry.history is not None and entry.policy != COLD:
            count_tokens(entry.history, table)
    sizes = [(percent, slots_of(trace, percent)) for percent in entry.percents]
    arenas = [ReplayArena(_policy(entry.policy, trace, slots), slots) for _, slots in sizes]
    replay(trace, arenas, table=table)
    return [
        Score(entry.policy, percent, slots, arena.prefill, arena.decode)
        for (percent, slots), arena in zip(sizes, arenas, strict=True)
    ]
