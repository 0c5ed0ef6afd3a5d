from __future__ import annotations

import os
import platform
import threading
import time

import numpy as np
import pytest
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from compute_node.engine.executor import Executor
from compute_node.engine.program import Program, Segment
from compute_node.kernels import Batch, Op, add, from_float32, matmul, rms_norm, silu_mul
from compute_node.kernels.lanes import i64_at
from compute_node.kernels.op import KERNEL
from compute_node.kernels.run_loop import LARGE_WORK, SHARED_WORK
from tierd.errors import TierdError, UsageError


@cfunc(KERNEL)
def shift_kernel(args, lo, hi):
    """y[u] = x[u ^ 1] + 1: reads what another thread may have written in the op before."""
    m = i64_at(args)
    x, y = i64_at(m[0]), i64_at(m[1])
    for unit in range(lo, hi):
        y[unit] = x[unit ^ 1] + unit


def op_of(kernel, args, units, *, work=0, grain=1, rows=None, per_row=False, keep=()):
    count = np.ones(1, np.int64) if rows is None else rows
    record = np.array(args, np.int64)
    return Op("op", "test", kernel.address, record, count, units, per_row, grain, work, keep)


def chain(length, units, work):
    """Ops that hand an array on, each reading the neighbour of what it writes."""
    x, y = np.arange(units), np.zeros(units, np.int64)
    pair = (x, y)
    ops = [
        op_of(
            shift_kernel,
            [pair[i % 2].ctypes.data, pair[1 - i % 2].ctypes.data],
            units,
            work=work[i % len(work)],
            keep=pair,
        )
        for i in range(length)
    ]
    return Segment("chain", ops), pair


def expected_chain(length, units):
    x = np.arange(units)
    for _ in range(length):
        x = x[np.arange(units) ^ 1] + np.arange(units)
    return x


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "work", [(0,), (SHARED_WORK,), (SHARED_WORK, 0), (0, 0, SHARED_WORK, SHARED_WORK, 0), (LARGE_WORK, 0, SHARED_WORK)]
)
def test_each_op_sees_all_that_the_one_before_wrote(threads, work):
    with Executor(threads) as executor:
        for _ in range(20):
            segment, pair = chain(25, 64, work)
            executor.run(segment)
            assert pair[25 % 2].tolist() == expected_chain(25, 64).tolist()


def layer(seed=0, rows=3, width=256):
    rng = np.random.default_rng(seed)
    batch = Batch(rows)
    batch.set_rows(rows)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    normed, gate, up, out = (np.zeros((rows, width), np.float32) for _ in range(4))
    weights = [
        from_float32(rng.standard_normal((width, width)).astype(np.float32) / 16, f)
        for f in ("bf16", "int4-g64", "int8")
    ]
    ops = [
        rms_norm("norm", x, np.ones(width, np.float32), 1e-6, normed, batch),
        matmul("gate", weights[0], normed, gate, batch),
        matmul("up", weights[1], normed, up, batch),
        silu_mul("silu", gate, up, gate, batch),
        matmul("down", weights[2], gate, out, batch),
        add("add", x, out, batch),
    ]
    return Segment("layer", ops), x


@cfunc(KERNEL)
def countdown_kernel(args, _lo, _hi):
    """Takes one from a number that halts the run while it is above zero."""
    m = i64_at(args)
    i64_at(m[0])[0] -= 1


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("work", [(0,), (SHARED_WORK,), (SHARED_WORK, 0)])
def test_an_op_halts_the_run_and_a_later_run_goes_on_behind_it(threads, work):
    with Executor(threads) as executor:
        for _ in range(20):
            segment, pair = chain(24, 64, work)
            left = np.array([3], np.int64)
            halting = [
                Op("halt", "test", countdown_kernel.address, left.ctypes.data + np.zeros(1, np.int64),
                   np.ones(1, np.int64), 1, False, 1, SHARED_WORK, (left,), halt=left)
                for _ in range(3)
            ]  # fmt: skip
            ops = [*segment.ops[:6], halting[0], *segment.ops[6:], *halting[1:]]
            whole = Segment("halting", ops)
            assert executor.run(whole) == 6
            assert pair[0].tolist() == expected_chain(6, 64).tolist()
            assert executor.run(whole, 7) == 25
            assert pair[0].tolist() == expected_chain(24, 64).tolist()
            assert executor.run(whole, 26) == len(ops)
            assert left[0] == 0


def test_each_op_in_a_call_of_its_own_gives_the_same_bits():
    with Executor(2) as executor:
        fused, x = layer()
        single, y = layer()
        executor.run(fused)
        executor.run_each(single)
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_fused_and_op_by_op_give_the_same_bits(threads):
    with Executor(threads) as executor:
        fused, x = layer()
        reference, y = layer()
        for _ in range(4):
            executor.run(fused)
            executor.run_reference(reference)
            assert x.tobytes() == y.tobytes()
        assert not np.array_equal(x, layer()[1])


def test_live_rows_are_read_when_the_segment_runs():
    rows, hits = np.array([3], np.int64), np.zeros(8, np.int64)
    op = op_of(shift_kernel, [hits.ctypes.data, hits.ctypes.data], 2, rows=rows, per_row=True, work=1, keep=(hits,))
    assert (op.live_units(), op.live_work()) == (6, 6)
    segment = Segment("s", [op])
    with Executor(2) as executor:
        executor.run(segment)
        assert hits[:6].any()
        assert not hits[6:].any()
        rows[0] = 0
        hits[:] = 0
        executor.run(segment)
        assert not hits.any()


@cfunc(KERNEL)
def border_kernel(args, lo, hi):
    """Marks where a slice begins and ends."""
    m = i64_at(args)
    i64_at(m[0])[lo] += 1
    i64_at(m[0])[hi] += 100


@pytest.mark.parametrize(("units", "grain"), [(100, 16), (7, 16), (64, 16), (5, 1), (1, 1)])
def test_slices_begin_at_multiples_of_the_grain_and_cover_all(units, grain):
    marks = np.zeros(units + 1, np.int64)
    op = op_of(border_kernel, [marks.ctypes.data], units, grain=grain, work=SHARED_WORK, keep=(marks,))
    with Executor(3) as executor:
        executor.run(Segment("s", [op]))
    begins, ends = np.flatnonzero(marks % 100), np.flatnonzero(marks // 100)
    assert begins[0] == 0
    assert ends[-1] == units
    assert begins[1:].tolist() == ends[:-1].tolist()
    assert all(begin % grain == 0 for begin in begins)
    assert len(begins) == min(3, -(-units // grain))


@pytest.mark.parametrize(("units", "grain"), [(1000, 3), (64, 1), (100, 16), (7, 16), (1, 1)])
def test_pieces_of_a_large_op_begin_at_multiples_of_the_grain_and_cover_all_once(units, grain):
    marks = np.zeros(units + 1, np.int64)
    op = op_of(border_kernel, [marks.ctypes.data], units, grain=grain, work=LARGE_WORK, keep=(marks,))
    with Executor(3) as executor:
        for _ in range(3):
            marks[:] = 0
            executor.run(Segment("s", [op]))
            begins, ends = np.flatnonzero(marks % 100), np.flatnonzero(marks // 100)
            assert set(marks[begins] % 100) == {1}
            assert [0, *ends.tolist()] == [*begins.tolist(), units]
            assert all(begin % grain == 0 for begin in begins)
    if units == 1000:
        assert len(begins) == 3 + 3 * 4


def test_idle_threads_sleep_and_wake_again():
    with Executor(3) as executor:
        segment, x = layer()
        reference, y = layer()
        for pause in (0, 0.01, 0.05):
            time.sleep(pause)
            executor.run(segment)
            executor.run_reference(reference)
            assert x.tobytes() == y.tobytes()
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.15


def test_two_callers_take_turns():
    with Executor(2) as executor:
        segments = [layer(seed) for seed in range(2)]

        def work(segment):
            for _ in range(50):
                executor.run(segment)

        callers = [threading.Thread(target=work, args=(segment,)) for segment, _ in segments]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        for seed, (_, x) in enumerate(segments):
            again, y = layer(seed)
            for _ in range(50):
                executor.run_reference(again)
            assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("threads", [1, 3])
def test_closing_ends_the_threads_and_refuses_more_work(threads):
    executor = Executor(threads)
    assert sum(t.name.startswith("kernels-") for t in threading.enumerate()) == threads - 1
    executor.close()
    executor.close()
    assert not any(t.name.startswith("kernels-") for t in threading.enumerate())
    for run in (executor.run, executor.run_each, executor.run_reference):
        with pytest.raises(TierdError, match="closed"):
            run(layer()[0])


def test_closing_waits_for_the_run_that_is_under_way():
    for _ in range(20):
        executor = Executor(2)
        segment, pair = chain(400, 64, (SHARED_WORK,))
        found = []

        def work(executor=executor, segment=segment, found=found):
            try:
                found.append(executor.run(segment))
            except TierdError as error:
                found.append(str(error))

        caller = threading.Thread(target=work)
        caller.start()
        executor.close()
        caller.join()
        assert found in ([400], ["the executor is closed"])
        assert found != [400] or pair[0].tolist() == expected_chain(400, 64).tolist()


def test_a_forgotten_executor_ends_its_threads():
    executor = Executor(2)
    executor.run(layer()[0])
    del executor
    assert not any(t.name.startswith("kernels-") for t in threading.enumerate())


def test_a_number_of_threads_that_makes_no_sense_is_refused():
    for threads in (0, -1, 5000):
        with pytest.raises(UsageError, match="1 to 1024 threads"):
            Executor(threads)


def test_an_executor_from_before_a_fork_says_so():
    with Executor(2) as executor:
        segment = layer()[0]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                executor.run(segment)
            except TierdError as error:
                code = 0 if "stayed in the process" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        executor.run(segment)


@intrinsic
def set_mode(_typing, bits):  # noqa: ARG001 - an intrinsic is typed by its arguments
    """Sets the SSE control register."""

    def generate(context, builder, _signature, arguments):
        word = cgutils.alloca_once_value(builder, arguments[0])
        pointer = builder.bitcast(word, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type])
        load = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.ldmxcsr")
        builder.call(load, [pointer])
        return context.get_dummy_value()

    return types.void(types.int32), generate


@njit("void(int32)")
def change_mode(bits):
    set_mode(bits)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets the control register of x86-64")
def test_a_thread_that_flushes_small_numbers_to_zero_is_refused():
    normal, flushing = 0x1F80, 0x1F80 | 0x8040
    found = []

    def work():
        change_mode(flushing)
        try:
            for run in (executor.run, executor.run_reference):
                with pytest.raises(TierdError, match="the calling thread turns very small numbers to zero"):
                    run(layer()[0])
            with pytest.raises(TierdError, match="a kernel thread turns"):
                Executor(2)
            found.append("refused")
        finally:
            change_mode(normal)

    with Executor(2) as executor:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        executor.run(layer()[0])
    assert found == ["refused"]


def test_a_program_describes_its_ops():
    program = Program([layer()[0], Segment("empty", [])])
    assert len(program) == 2
    text = program.describe()
    assert "layer:" in text
    assert "up  [matmul int4-g64, 256 units]" in text
    assert "norm  [rms_norm, 1 units per row]" in text
    with Executor(2) as executor:
        for segment in program:
            executor.run(segment)


def test_an_op_without_a_kernel_is_refused():
    op = op_of(shift_kernel, [0], 1)
    op.address = 0
    with pytest.raises(UsageError, match="needs a kernel"):
        Segment("s", [op])
