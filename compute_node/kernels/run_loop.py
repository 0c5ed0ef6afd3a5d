"""The native loop that runs a segment, and the life of a worker thread. It knows ops by address alone.

Every thread walks the same table, takes its slice of each op and meets the others before the next op may read what this
one wrote. Of a large op the ends of all slices are left to whoever is ready first: a core that also serves others is
slower than its neighbour, and no split known in advance is even. An op too small to be worth sharing is done by thread
0; two such ops in a row need no meeting. While a thread waits for the others, the first weights of its next part are on
their way to its cache. An op may halt the run, where Python has to do something; a later run begins behind it.
No split ever changes a result, since units are independent.
"""

from __future__ import annotations

from typing import Any, Final

from numba import njit

from compute_node.kernels.lanes import f32_at, i64_at, prefetch_line
from compute_node.kernels.threads import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    flushes_to_zero,
    futex_wait,
    futex_wake,
    nanoseconds,
    pause,
    sched_yield,
)

__all__ = [
    "BLOCK_WORDS",
    "CLOSED",
    "FIELDS",
    "FORKED",
    "LARGE_WORK",
    "SHARED_WORK",
    "WRONG_MODE",
    "run_table",
    "stop",
    "worker",
    "wrong_mode",
]

# Fields of an op in a segment's table. NEXT is the number of the next op with weights that are known in advance.
OP_ADDRESS, OP_ARGS, OP_ROWS, OP_UNITS, OP_PER_ROW, OP_GRAIN, OP_WORK, OP_HALT = range(8)
OP_WEIGHTS, OP_UNIT_BYTES, OP_NEXT = range(8, 11)
FIELDS: Final = 16

# Words of the control block, as byte offsets. What belongs together shares a cache line: what a run is, then what
# threads that meet write, each word for itself, then what is the caller's alone.
GENERATION, TABLE, FIRST, OPS, STOP = (i * 8 for i in range(5))
ARRIVED, PHASE, SLEEPERS, HALTED = (i * 64 for i in range(1, 5))
TICKETS, SERVED, REFUSAL, THREADS, BEGUN, ENDED, SPENT, TINY = (320 + i * 8 for i in range(8))
TAKEN: Final = 384
"""How many pieces of the op's open ends were taken; 0 whenever threads have met."""
BLOCK_WORDS: Final = 56

WRONG_MODE, CLOSED, FORKED = -1, -2, -3
"""Why a run is refused; the last two stand in `REFUSAL`."""

SHARED_WORK: Final = 1 << 19
"""Multiply-adds below which one thread does an op alone: 10 to 30 us, what a meeting costs where others use the cores.

A meeting of free cores costs 0.3 us, but a model so small that this matters is fast enough on one core, while two
threads that meet a hundred times a token are several times slower than one as soon as another process runs.
"""
LARGE_WORK: Final = 1 << 26
"""Multiply-adds from which an op's slices have open ends: about a millisecond of two cores."""
_OPEN_SHARE: Final = 4
"""One part in so many of a slice is its open end."""
_PIECES: Final = 4
"""Pieces of an open end: taken one by one, the last of them is what threads may wait for."""
_AHEAD_LINES: Final = 128
"""Cache lines of the next op's weights that a thread asks for when it has done its part of an op."""
_SPIN_NANOSECONDS: Final = 50_000
_YIELD_NANOSECONDS: Final = 1_000_000
"""How long a worker looks for the next run before it sleeps, leaving its core to whoever wants it between looks.

A core that nobody uses falls asleep with it. In a virtual machine waking it takes a good part of a millisecond, while
Python needs a few tenths of one between two steps.
"""
_SPINS_BEFORE_YIELD: Final = 2000


@njit(nogil=True, cache=True)
def _live_work(table: int, index: int) -> Any:
    op = i64_at(table + index * FIELDS * 8)
    return op[OP_UNITS] * i64_at(op[OP_ROWS])[0] * op[OP_WORK]


@njit(nogil=True, cache=True)
def _shared(table: int, index: int) -> Any:
    """True if all threads take part in an op."""
    halt = i64_at(table + index * FIELDS * 8)[OP_HALT]
    return halt == 0 and _live_work(table, index) >= SHARED_WORK


@njit(nogil=True, cache=True)
def _slice(op: Any, part: int, parts: int) -> Any:
    """First and end unit of this thread's part of an op; slices begin at multiples of the op's grain."""
    units = op[OP_UNITS] * (i64_at(op[OP_ROWS])[0] if op[OP_PER_ROW] != 0 else 1)
    grains = (units + op[OP_GRAIN] - 1) // op[OP_GRAIN]
    return grains * part // parts * op[OP_GRAIN], min(grains * (part + 1) // parts * op[OP_GRAIN], units)


@njit(nogil=True, cache=True)
def _run_slice(table: int, index: int, part: int, parts: int) -> None:
    """This thread's part of an op."""
    op = i64_at(table + index * FIELDS * 8)
    lo, hi = _slice(op, part, parts)
    if lo < hi:
        call_kernel(op[OP_ADDRESS], op[OP_ARGS], lo, hi)


@njit(nogil=True, cache=True)
def _run_shared(block: int, table: int, index: int, part: int, threads: int) -> None:
    """This thread's part of an op that all take part in: its slice, or that without the end, then pieces of any end."""
    op = i64_at(table + index * FIELDS * 8)
    if _live_work(table, index) < LARGE_WORK:
        _run_slice(table, index, part, threads)
        return
    grain = op[OP_GRAIN]
    lo, hi = _slice(op, part, threads)
    closed = _closed(lo, hi, grain)
    if lo < closed:
        call_kernel(op[OP_ADDRESS], op[OP_ARGS], lo, closed)
    while True:
        taken = atomic_add(block + TAKEN, 1)
        if taken >= threads * _PIECES:
            return
        lo, hi = _slice(op, taken % threads, threads)
        closed, piece = _closed(lo, hi, grain), taken // threads
        grains = (hi - closed + grain - 1) // grain
        first, end = closed + grains * piece // _PIECES * grain, closed + grains * (piece + 1) // _PIECES * grain
        if first < min(end, hi):
            call_kernel(op[OP_ADDRESS], op[OP_ARGS], first, min(end, hi))


@njit(nogil=True, cache=True)
def _closed(lo: int, hi: int, grain: int) -> int:
    """Where the open end of a slice begins."""
    grains = (hi - lo + grain - 1) // grain
    return lo + (grains - grains // _OPEN_SHARE) * grain if grains >= _OPEN_SHARE else hi


@njit(nogil=True, cache=True)
def _ask_ahead(table: int, index: int, ops: int, part: int, parts: int) -> None:
    """Asks for the first weights of this thread's part of the next op that has some."""
    following = i64_at(table + index * FIELDS * 8)[OP_NEXT]
    if following < ops:
        op = i64_at(table + following * FIELDS * 8)
        lo, hi = _slice(op, part, parts)
        start = op[OP_WEIGHTS] + lo * op[OP_UNIT_BYTES]
        for line in range(min(_AHEAD_LINES, (hi - lo) * op[OP_UNIT_BYTES] // 64)):
            prefetch_line(start + line * 64)


@njit(nogil=True, cache=True)
def _meet(block: int, threads: int, phase: int) -> Any:
    """Waits until all threads are here: a short spin, then leaving the core to others between looks.

    Returns True if the run ends here. All learn it from the word that lets them go: it stands until they meet again,
    while `HALTED` may by then be that of another run.
    """
    if atomic_add(block + ARRIVED, 1) == threads - 1:
        halted = atomic_load(block + HALTED)
        atomic_store(block + ARRIVED, 0)
        atomic_store(block + TAKEN, 0)
        atomic_store(block + PHASE, 2 * phase + halted)
        return halted != 0
    spins = 0
    while True:
        found = atomic_load(block + PHASE)
        if found >> 1 == phase:
            return found & 1 != 0
        spins += 1
        if spins < _SPINS_BEFORE_YIELD:
            pause()
        else:
            sched_yield()


@njit(nogil=True, cache=True)
def _run_part(block: int, table: int, first: int, ops: int, part: int, threads: int) -> Any:
    """Ops first..ops as thread `part`; the number of the op that ended the run, or `ops`.

    An op that may halt also decides how much the ops behind it have to do. So all meet after it, before anyone looks.
    """
    phase = atomic_load(block + PHASE) >> 1
    for index in range(first, ops):
        halt = i64_at(table + index * FIELDS * 8)[OP_HALT]
        shared = _shared(table, index)
        if shared:
            _run_shared(block, table, index, part, threads)
            _ask_ahead(table, index, ops, part, threads)
        elif part == 0:
            _run_slice(table, index, 0, 1)
            if halt != 0 and atomic_load(halt) != 0:
                atomic_store(block + HALTED, 1)
        if index + 1 == ops or shared or halt != 0 or _shared(table, index + 1):
            phase += 1
            if _meet(block, threads, phase):
                return index
    return ops


@njit(nogil=True, cache=True)
def _run_alone(table: int, first: int, ops: int) -> Any:
    for index in range(first, ops):
        _run_slice(table, index, 0, 1)
        halt = i64_at(table + index * FIELDS * 8)[OP_HALT]
        if halt != 0 and atomic_load(halt) != 0:
            return index
    return ops


@njit("boolean(int64)", nogil=True, cache=True)
def wrong_mode(block: int) -> Any:
    """True if this thread turns the very small number at `block + TINY` into zero: results would change."""
    return flushes_to_zero(f32_at(block + TINY)[0])


@njit(nogil=True, cache=True)
def _take_turn(block: int) -> Any:
    """Waits until it is this caller's turn, in the order in which they came; returns the ticket for `_end_turn`."""
    ticket = atomic_add(block + TICKETS, 1)
    while True:
        served = atomic_load(block + SERVED)
        if served == ticket:
            return ticket
        futex_wait(block + SERVED, served)


@njit(nogil=True, cache=True)
def _end_turn(block: int, ticket: int) -> None:
    """Lets the next caller run. One that comes now sees `SERVED` raised, or is seen and woken."""
    atomic_store(block + SERVED, ticket + 1)
    if atomic_load(block + TICKETS) != ticket + 1:
        futex_wake(block + SERVED)


@njit(nogil=True, cache=True)
def _run_all(block: int, table: int, first: int, ops: int) -> Any:
    threads = atomic_load(block + THREADS)
    worth = False
    for index in range(first, ops):
        worth = worth or _live_work(table, index) >= SHARED_WORK
    if threads == 1 or not worth:
        return _run_alone(table, first, ops)
    atomic_store(block + HALTED, 0)
    atomic_store(block + TABLE, table)
    atomic_store(block + FIRST, first)
    atomic_store(block + OPS, ops)
    atomic_add(block + GENERATION, 1)
    if atomic_load(block + SLEEPERS) != 0:
        futex_wake(block + GENERATION)
    return _run_part(block, table, first, ops, 0, threads)


@njit("int64(int64, int64, int64, int64)", nogil=True, cache=True)
def run_table(block: int, table: int, first: int, ops: int) -> Any:
    """Runs ops of a table on the calling thread, as part 0, and on the workers; alone if no op is worth sharing.

    Callers take turns. When each began and ended stands in the block, since a clock and a lock of Python cost more
    than this call: after a run everything that they touch comes from memory.

    Returns the number of the op that halted, `ops` if none did, or with nothing run: `WRONG_MODE` if the calling
    thread's floating-point mode would change results, `CLOSED` or `FORKED` as the block says.

    Args:
        block: address of the control block.
        table: address of the segment's table.
        first: where to begin.
        ops: how many the table has.
    """
    refusal = atomic_load(block + REFUSAL)
    if refusal != 0:
        return refusal
    if wrong_mode(block):
        return WRONG_MODE
    ticket = _take_turn(block)
    refusal = atomic_load(block + REFUSAL)  # by who was here before
    if refusal == 0:
        begun = nanoseconds()
        refusal = _run_all(block, table, first, ops)
        ended = nanoseconds()
        words = i64_at(block)
        words[BEGUN // 8] = begun
        words[ENDED // 8] = ended
        words[SPENT // 8] += ended - begun
    _end_turn(block, ticket)
    return refusal


@njit("int64(int64, int64)", nogil=True, cache=True)
def _next(block: int, seen: int) -> Any:
    """Waits for another generation than `seen`: spins for 50 us, yields for a millisecond, then sleeps."""
    begun = nanoseconds()
    while True:
        generation = atomic_load(block + GENERATION)
        if generation != seen:
            return generation
        waited = nanoseconds() - begun
        if waited < _SPIN_NANOSECONDS:
            pause()
            continue
        if waited < _YIELD_NANOSECONDS:
            sched_yield()
            continue
        # Counted as a sleeper first and looked again after: the caller raises the generation before it counts.
        atomic_add(block + SLEEPERS, 1)
        if atomic_load(block + GENERATION) == seen:
            futex_wait(block + GENERATION, seen)
        atomic_add(block + SLEEPERS, -1)


@njit("void(int64, int64, int64)", nogil=True, cache=True)
def worker(block: int, part: int, threads: int) -> None:
    """The life of a worker: waits for a segment, takes its part, until told to stop.

    Args:
        block: address of the control block, at generation 0 when the workers are made.
        part: 1 ... threads - 1.
        threads: the caller and its workers.
    """
    seen = 0
    while True:
        seen = _next(block, seen)
        if atomic_load(block + STOP) != 0:
            return
        table, first, ops = (atomic_load(block + TABLE), atomic_load(block + FIRST), atomic_load(block + OPS))
        _run_part(block, table, first, ops, part, threads)


@njit("void(int64)", nogil=True, cache=True)
def stop(block: int) -> None:
    """Waits for the run that is under way, then tells the workers to leave; no run begins any more."""
    ticket = _take_turn(block)
    atomic_store(block + REFUSAL, CLOSED)
    atomic_store(block + STOP, 1)
    atomic_add(block + GENERATION, 1)
    futex_wake(block + GENERATION)
    _end_turn(block, ticket)
