"""Runs the daemon's own policy classes over a recorded trace: what would they have had in RAM?

For one session without prefetch the hit counts are the daemon's: the same requests in the same waves, residents used
first, victims chosen before anything new comes in, and nobody leaves whom the request itself wants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tierd.errors import UsageError
from tierd.policy.expectation import Expectation
from tierd.policy.policy import EvictionPolicy
from tierd.policy.token_table import TokenTable
from tierd.policy.trace import Trace
from tierd.policy.waves import wave_size

__all__ = ["Counts", "ReplayArena", "Request", "count_tokens", "future", "replay", "requests_of", "slots_of"]

_SESSION = 0


@dataclass(slots=True)
class Counts:
    """Wanted experts, and how many of them were resident."""

    requests: int = 0
    hits: int = 0

    @property
    def misses(self) -> int:
        """Experts that had to be read."""
        return self.requests - self.hits

    @property
    def hit_rate(self) -> float:
        """Share of hits; 0 where nothing was wanted."""
        return self.hits / self.requests if self.requests else 0.0


@dataclass(slots=True)
class ReplayArena:
    """An arena of `slots` experts under one policy.

    Attributes:
        policy: who leaves.
        slots: experts that fit.
        prefill: counts of prefill steps.
        decode: counts of decode steps.
        lacking: requests of decode steps by how many experts they lacked, at least one.
        resident: flat numbers of who is in RAM.
    """

    policy: EvictionPolicy
    slots: int
    prefill: Counts = field(default_factory=Counts)
    decode: Counts = field(default_factory=Counts)
    lacking: Counter[int] = field(default_factory=Counter)
    resident: set[int] = field(default_factory=set)

    @property
    def total(self) -> Counts:
        """Both phases together."""
        return Counts(self.prefill.requests + self.decode.requests, self.prefill.hits + self.decode.hits)

    def request(self, wanted: Sequence[int], *, prefill: bool) -> None:
        """One request of a session: distinct flat numbers in router order, no more than slots."""
        policy, resident = self.policy, self.resident
        missing = []
        for expert in wanted:
            if expert in resident:
                policy.used(expert)
            else:
                missing.append(expert)
        for _ in range(len(resident) + len(missing) - self.slots):
            victim = policy.victim(lambda expert: expert not in wanted)
            if victim is None:
                raise UsageError(f"{len(wanted)} experts do not fit {self.slots} slots at once")
            policy.removed(victim)
            resident.remove(victim)
        for expert in missing:
            policy.inserted(expert)
            policy.used(expert)
            resident.add(expert)
        counts = self.prefill if prefill else self.decode
        counts.requests += len(wanted)
        counts.hits += len(wanted) - len(missing)
        if missing and not prefill:
            self.lacking[len(missing)] += 1


@dataclass(frozen=True, slots=True)
class Request:
    """What a step wants of one layer.

    Attributes:
        rows: the step's rows in the trace.
        step: its number, rising by one.
        layer: place among the layers with routed experts.
        wanted: flat numbers, distinct: the first choices of all rows, then the second ones, and so on.
        prefill: which kind of step it is.
    """

    rows: range
    step: int
    layer: int
    wanted: tuple[int, ...]
    prefill: bool


def requests_of(trace: Trace) -> Iterator[Request]:
    """The requests of a trace, in order."""
    bounds, flat = trace.step_bounds(), trace.flat()
    for step, (begin, end) in enumerate(pairwise(bounds)):
        prefill, by_rank = bool(trace.prefill[begin]), flat[begin:end].transpose(1, 2, 0)
        for layer, choices in enumerate(by_rank.reshape(len(trace.layers), -1).tolist()):
            wanted = choices if end == begin + 1 else dict.fromkeys(choices)
            yield Request(range(begin, end), step, layer, tuple(wanted), prefill)


def count_tokens(trace: Trace, table: TokenTable) -> None:
    """Counts a whole trace into a token table, as the history of earlier runs would have."""
    previous: int | None = None
    sequences = trace.sequences.tolist()
    for row, (token, chosen) in enumerate(zip(trace.tokens.tolist(), trace.flat(), strict=True)):
        before = previous if row and sequences[row] == sequences[row - 1] else None
        table.count(token, chosen, previous=before)
        previous = token


def replay(trace: Trace, arenas: Sequence[ReplayArena], *, table: TokenTable | None = None) -> None:
    """Runs a trace through arenas side by side; each is the daemon's arena in a run of its own.

    Args:
        trace: what the routers chose.
        arenas: as they are at the beginning; their counts go on.
        table: what the node expects comes from here, and what it sees is counted into it. None: it expects nothing.
    """
    expectation = Expectation(table) if table is not None else None
    waves = [wave_size(arena.slots, trace.top_k) for arena in arenas]
    flat, tokens, last = trace.flat(), trace.tokens.tolist(), len(trace.layers) - 1
    for request in requests_of(trace):
        rows = request.rows
        if expectation is not None and request.layer == 0:
            expectation.begin(tokens[rows.start : rows.stop])
        for arena, wave in zip(arenas, waves, strict=True):
            policy = arena.policy
            policy.visit(_SESSION, request.step, trace.layers[request.layer], prefill=request.prefill)
            if expectation is not None:
                policy.expected(_SESSION, expectation.out)
            for begin in range(0, len(request.wanted), wave):
                arena.request(request.wanted[begin : begin + wave], prefill=request.prefill)
        if expectation is not None:
            expectation.passed(request.layer)
            if request.layer == last:
                expectation.end(flat[rows.start : rows.stop], previous=_previous(trace, rows.start))


def _previous(trace: Trace, row: int) -> int | None:
    if row == 0 or trace.sequences[row] != trace.sequences[row - 1]:
        return None
    return int(trace.tokens[row - 1])


def future(trace: Trace, slots: int) -> list[tuple[int, ...]]:
    """The requests that an arena of so many slots gets, waves and all: what Belady's rule wants to know."""
    wave = wave_size(slots, trace.top_k)
    return [
        request.wanted[begin : begin + wave]
        for request in requests_of(trace)
        for begin in range(0, len(request.wanted), wave)
    ]


def slots_of(trace: Trace, percent: float) -> int:
    """Slots of an arena of so many percent of the experts, as in the daemon; UsageError if a token's do not fit."""
    slots = int(trace.experts_total * percent / 100)
    if slots < trace.top_k:
        raise UsageError(
            f"--arena {percent:g}%: {slots} of {trace.experts_total} experts fit, fewer than a token's {trace.top_k}"
        )
    return slots
