"""The native loop that runs a segment, and the life of a worker thread. It knows ops by address alone.

Every thread walks the same table, takes its slice of each op and meets the others before the next op may read what
this one wrote. An op too small to be worth sharing is done by thread 0; two such ops in a row need no meeting.
The split depends on sizes only and never changes a result, since units are independent.
"""

from __future__ import annotations

from typing import Any, Final

from numba import njit

from compute_node.kernels.lanes import f32_at, i64_at
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

__all__ = ["BLOCK_WORDS", "FIELDS", "SHARED_WORK", "TINY", "run_table", "stop", "worker", "wrong_mode"]

# Fields of an op in a segment's table.
OP_ADDRESS, OP_ARGS, OP_ROWS, OP_UNITS, OP_PER_ROW, OP_GRAIN, OP_WORK = range(7)
FIELDS: Final = 8

# Words of the control block, each on its own cache line: 8 int64 apart.
GENERATION, TABLE, OPS, ARRIVED, PHASE, SLEEPERS, STOP, TINY = (i * 64 for i in range(8))
BLOCK_WORDS: Final = 64

SHARED_WORK: Final = 1 << 16
"""Multiply-adds below which one thread does an op alone: some 10 us, about what a meeting costs on a busy machine."""
_SPIN_NANOSECONDS: Final = 50_000
_SPINS_BEFORE_YIELD: Final = 2000


@njit(nogil=True, cache=True)
def _live_work(table: int, index: int) -> Any:
    op = i64_at(table + index * FIELDS * 8)
    return op[OP_UNITS] * i64_at(op[OP_ROWS])[0] * op[OP_WORK]


@njit(nogil=True, cache=True)
def _run_slice(table: int, index: int, part: int, parts: int) -> None:
    """This thread's part of an op; slices begin at multiples of the op's grain."""
    op = i64_at(table + index * FIELDS * 8)
    units = op[OP_UNITS] * (i64_at(op[OP_ROWS])[0] if op[OP_PER_ROW] != 0 else 1)
    grains = (units + op[OP_GRAIN] - 1) // op[OP_GRAIN]
    lo = grains * part // parts * op[OP_GRAIN]
    hi = min(grains * (part + 1) // parts * op[OP_GRAIN], units)
    if lo < hi:
        call_kernel(op[OP_ADDRESS], op[OP_ARGS], lo, hi)


@njit(nogil=True, cache=True)
def _meet(block: int, threads: int, phase: int) -> None:
    """Waits until all threads are here: a short spin, then leaving the core to others between looks."""
    if atomic_add(block + ARRIVED, 1) == threads - 1:
        atomic_store(block + ARRIVED, 0)
        atomic_store(block + PHASE, phase)
        return
    spins = 0
    while atomic_load(block + PHASE) != phase:
        spins += 1
        if spins < _SPINS_BEFORE_YIELD:
            pause()
        else:
            sched_yield()


@njit(nogil=True, cache=True)
def _run_part(block: int, table: int, ops: int, part: int, threads: int) -> None:
    phase = atomic_load(block + PHASE)
    for index in range(ops):
        shared = _live_work(table, index) >= SHARED_WORK
        if shared:
            _run_slice(table, index, part, threads)
        elif part == 0:
            _run_slice(table, index, 0, 1)
        if index + 1 == ops or shared or _live_work(table, index + 1) >= SHARED_WORK:
            phase += 1
            _meet(block, threads, phase)


@njit("boolean(int64)", nogil=True, cache=True)
def wrong_mode(block: int) -> Any:
    """True if this thread turns the very small number at `block + TINY` into zero: results would change."""
    return flushes_to_zero(f32_at(block + TINY)[0])


@njit("boolean(int64, int64, int64, int64)", nogil=True, cache=True)
def run_table(block: int, table: int, ops: int, threads: int) -> bool:
    """Runs a segment on the calling thread, as part 0, and on the workers; alone if no op is worth sharing.

    Returns False, with nothing run, if the calling thread's floating-point mode would change results.

    Args:
        block: address of the control block.
        table: address of the segment's table.
        ops: how many.
        threads: the caller and its workers.
    """
    if wrong_mode(block):
        return False
    worth = False
    for index in range(ops):
        worth = worth or _live_work(table, index) >= SHARED_WORK
    if threads == 1 or not worth:
        for index in range(ops):
            _run_slice(table, index, 0, 1)
        return True
    atomic_store(block + TABLE, table)
    atomic_store(block + OPS, ops)
    atomic_add(block + GENERATION, 1)
    if atomic_load(block + SLEEPERS) != 0:
        futex_wake(block + GENERATION)
    _run_part(block, table, ops, 0, threads)
    return True


@njit("int64(int64, int64)", nogil=True, cache=True)
def _next(block: int, seen: int) -> Any:
    """Waits for another generation than `seen`: spins for 50 us at most, then sleeps."""
    deadline = nanoseconds() + _SPIN_NANOSECONDS
    while True:
        generation = atomic_load(block + GENERATION)
        if generation != seen:
            return generation
        if nanoseconds() < deadline:
            pause()
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
        _run_part(block, atomic_load(block + TABLE), atomic_load(block + OPS), part, threads)


@njit("void(int64)", nogil=True, cache=True)
def stop(block: int) -> None:
    """Tells the workers to leave."""
    atomic_store(block + STOP, 1)
    atomic_add(block + GENERATION, 1)
    futex_wake(block + GENERATION)
