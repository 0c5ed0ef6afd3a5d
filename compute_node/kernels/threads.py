"""What threads need from the machine, as LLVM code: ordered loads and stores, pause, yield, futex, a clock.

C library functions are declared by name, because an address from ctypes would make the caller uncacheable.
"""

# ruff: noqa: ARG001 - an intrinsic is typed by its arguments and uses them in the code it generates
from __future__ import annotations

import platform
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from compute_node.kernels.lanes import F32, I32, I64

__all__ = [
    "atomic_add",
    "atomic_load",
    "atomic_store",
    "call_kernel",
    "count_use",
    "flushes_to_zero",
    "futex_wait",
    "futex_wake",
    "load_fence",
    "nanoseconds",
    "pause",
    "sched_yield",
]

_FUTEX_NUMBER: Final = {"x86_64": 202, "aarch64": 98}
_MACHINE: Final = platform.machine()
_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129
_CLOCK_MONOTONIC: Final = 1
_WAKE_ALL: Final = 0x7FFFFFFF


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def atomic_add(_typing: Any, address: Any, value: Any) -> Any:
    """Adds to an int64 at an address and returns what was there; sequentially consistent."""

    def generate(_context: Any, builder: Any, _signature: Any, a: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, a[0]), a[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_load(_typing: Any, address: Any) -> Any:
    """Reads an int64; later reads stay later. Sequentially consistent."""

    def generate(_context: Any, builder: Any, _signature: Any, a: Any) -> Any:
        return builder.load_atomic(_word(builder, a[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def atomic_store(_typing: Any, address: Any, value: Any) -> Any:
    """Writes an int64; earlier writes stay earlier. Sequentially consistent."""

    def generate(context: Any, builder: Any, _signature: Any, a: Any) -> Any:
        builder.store_atomic(a[1], _word(builder, a[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def count_use(_typing: Any, last_step: Any, step: Any, uses: Any) -> Any:
    """Stores the low half of `step` at an address, then adds 1 to the uint32 at another, in this order for readers."""

    def generate(context: Any, builder: Any, _signature: Any, a: Any) -> Any:
        half = I32.as_pointer()
        builder.store_atomic(builder.trunc(a[1], I32), builder.inttoptr(a[0], half), "release", 4)
        counter = builder.inttoptr(a[2], half)
        more = builder.add(builder.load_atomic(counter, "monotonic", 4), ir.Constant(I32, 1))
        builder.store_atomic(more, counter, "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def load_fence(_typing: Any) -> Any:
    """Keeps every load before it before every load after it."""

    def generate(context: Any, builder: Any, _signature: Any, _a: Any) -> Any:
        builder.fence("acquire")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pause(_typing: Any) -> Any:
    """Tells the core that this thread spins."""

    def generate(context: Any, builder: Any, _signature: Any, _a: Any) -> Any:
        if _MACHINE == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def sched_yield(_typing: Any) -> Any:
    """Lets another thread have the core."""

    def generate(context: Any, builder: Any, _signature: Any, _a: Any) -> Any:
        kind = ir.FunctionType(I32, [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def nanoseconds(_typing: Any) -> Any:
    """Monotonic time in nanoseconds."""

    def generate(_context: Any, builder: Any, _signature: Any, _a: Any) -> Any:
        pair = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
        first = builder.bitcast(pair, I64.as_pointer())
        kind = ir.FunctionType(I32, [I32, I64.as_pointer()])
        clock = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(clock, [ir.Constant(I32, _CLOCK_MONOTONIC), first])
        second = builder.load(builder.gep(first, [ir.Constant(I64, 1)]))
        return builder.add(builder.mul(builder.load(first), ir.Constant(I64, 1_000_000_000)), second)

    return types.int64(), generate


def _futex(builder: Any, address: Any, operation: int, value: Any) -> Any:
    kind = ir.FunctionType(I64, [I64], var_arg=True)
    syscall = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    number = ir.Constant(I64, _FUTEX_NUMBER[_MACHINE])
    zero = ir.Constant(I64, 0)
    return builder.call(syscall, [number, address, ir.Constant(I64, operation), value, zero, zero, zero])


@intrinsic
def futex_wait(_typing: Any, address: Any, value: Any) -> Any:
    """Sleeps while the low 32 bits at an address are those of `value`; may return early."""

    def generate(_context: Any, builder: Any, _signature: Any, a: Any) -> Any:
        low = builder.and_(a[1], ir.Constant(I64, 0xFFFFFFFF))
        return _futex(builder, a[0], _WAIT_PRIVATE, low)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def futex_wake(_typing: Any, address: Any) -> Any:
    """Wakes every thread that sleeps at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, a: Any) -> Any:
        return _futex(builder, a[0], _WAKE_PRIVATE, ir.Constant(I64, _WAKE_ALL))

    return types.int64(types.int64), generate


@intrinsic
def call_kernel(_typing: Any, kernel: Any, args: Any, lo: Any, hi: Any) -> Any:
    """Calls the kernel at an address for units lo..hi."""

    def generate(context: Any, builder: Any, _signature: Any, a: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
        builder.call(builder.inttoptr(a[0], kind.as_pointer()), [a[1], a[2], a[3]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def flushes_to_zero(_typing: Any, tiny: Any) -> Any:
    """True if this thread's floating-point mode turns very small numbers to zero; `tiny` is 1e-40."""

    def generate(_context: Any, builder: Any, _signature: Any, a: Any) -> Any:
        half = builder.fmul(a[0], ir.Constant(F32, 0.5))
        return builder.fcmp_ordered("==", half, ir.Constant(F32, 0.0))

    return types.boolean(types.float32), generate
