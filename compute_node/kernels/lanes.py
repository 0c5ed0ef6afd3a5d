"""LLVM building blocks: sixteen float32 lanes, their fused multiply-add, their one way to be summed, exp.

`<16 x float>` is one AVX-512 register, two AVX2 registers or portable code; the compiler chooses, and every choice
gives the same bits, since each lane is one IEEE operation. Nothing here allows reassociation.
"""

# ruff: noqa: ARG001 - an intrinsic is typed by its arguments and uses them in the code it generates
from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from compute_node.kernels.cache import processor

__all__ = [
    "F32",
    "I8",
    "I16",
    "I32",
    "I64",
    "LANES",
    "exp32",
    "f32_at",
    "fma",
    "fma32",
    "has_feature",
    "i32_at",
    "i64_at",
    "lane_ints",
    "lanes_at",
    "larger32",
    "offset",
    "prefetch",
    "prefetch_line",
    "splat",
    "sum_lanes",
    "u8_at",
    "zero_lanes",
]

LANES: Final = 16
F32: Final = ir.FloatType()
I8: Final = ir.IntType(8)
I16: Final = ir.IntType(16)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)
V32: Final = ir.VectorType(I32, LANES)
VF32: Final = ir.VectorType(F32, LANES)


def has_feature(name: str) -> bool:
    """True if code is compiled for a processor with this feature, such as `avx512f`."""
    return f"+{name}" in processor()[1].split(",")


def zero_lanes() -> ir.Constant:
    """Sixteen zeros."""
    return ir.Constant(VF32, [0.0] * LANES)


def lane_ints(value: int) -> ir.Constant:
    """One int32 constant in every lane."""
    return ir.Constant(V32, [value] * LANES)


def offset(builder: ir.IRBuilder, pointer: Any, count: Any) -> Any:
    """The byte pointer `pointer` moved by `count` bytes (an int64 value or a Python int)."""
    return builder.gep(pointer, [ir.Constant(I64, count) if isinstance(count, int) else count])


def lanes_at(builder: ir.IRBuilder, pointer: Any, element: Any = F32) -> Any:
    """Loads sixteen elements from a byte pointer; no alignment is assumed."""
    typed = builder.bitcast(pointer, ir.VectorType(element, LANES).as_pointer())
    return builder.load(typed, align=1)


def prefetch(builder: ir.IRBuilder, pointer: Any) -> None:
    """Asks for the cache line at a byte pointer, into L2; it need not be mapped. Changes no result."""
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, keep, data = (ir.Constant(I32, value) for value in (0, 2, 1))
    builder.call(ask, [pointer, read, keep, data])


@intrinsic
def prefetch_line(_typing: Any, address: Any) -> Any:
    """Asks for the cache line at an address, into L2; it need not be mapped. Changes no result."""

    def generate(context: Any, builder: Any, _signature: Any, a: Any) -> Any:
        prefetch(builder, builder.inttoptr(a[0], I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), generate


def splat(builder: ir.IRBuilder, value: Any, count: int = LANES) -> Any:
    """One float in every one of so many lanes."""
    nothing = ir.Constant(ir.VectorType(F32, count), ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(I32, count), [0] * count))


def _intrinsic(builder: ir.IRBuilder, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, arguments)
    return cgutils.get_or_insert_function(builder.module, kind, name)


def fma(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` rounded once, for one float or any number of lanes."""
    name = "llvm.fma.f32" if a.type == F32 else f"llvm.fma.v{a.type.count}f32"
    return builder.call(_intrinsic(builder, name, a.type, [a.type] * 3), [a, b, c])


def sum_lanes(builder: ir.IRBuilder, vector: Any) -> Any:
    """The sum of sixteen or eight lanes by one fixed tree: lane j plus lane j + 8, then 4, 2, 1."""
    width = vector.type.count
    while width > 1:
        width //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        mask = ir.VectorType(I32, width)
        low = builder.shuffle_vector(vector, undefined, ir.Constant(mask, list(range(width))))
        high = builder.shuffle_vector(vector, undefined, ir.Constant(mask, list(range(width, 2 * width))))
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, ir.Constant(I32, 0))


_LOG2_E: Final = 1.4426950408889634
_LN2_HIGH: Final = 0.693145751953125  # ln 2 to 16 bits: n times it is exact for |n| < 256
_LN2_LOW: Final = 1.4286068203094172e-06  # ln 2 less the above
_ROUND: Final = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, held in the low bits
_EXP_LOW, _EXP_HIGH = -87.0, 88.0
_SERIES: Final = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)


def _exp(builder: ir.IRBuilder, x: Any) -> Any:
    def number(value: float) -> ir.Constant:
        return ir.Constant(F32, value)

    inside = builder.select(builder.fcmp_ordered(">", x, number(_EXP_LOW)), x, number(_EXP_LOW))
    inside = builder.select(builder.fcmp_ordered("<", inside, number(_EXP_HIGH)), inside, number(_EXP_HIGH))
    shifted = fma(builder, inside, number(_LOG2_E), number(_ROUND))
    power = builder.fsub(shifted, number(_ROUND))
    rest = fma(builder, power, number(-_LN2_HIGH), inside)
    rest = fma(builder, power, number(-_LN2_LOW), rest)
    series = number(_SERIES[0])
    for coefficient in _SERIES[1:]:
        series = fma(builder, series, rest, number(coefficient))
    # Multiply by 2^power in the exponent bits. The range above keeps the result a normal number.
    steps = builder.sub(builder.bitcast(shifted, I32), builder.bitcast(number(_ROUND), I32))
    scaled = builder.add(builder.bitcast(series, I32), builder.shl(steps, ir.Constant(I32, 23)))
    value = builder.bitcast(scaled, F32)
    value = builder.select(builder.fcmp_ordered("<", x, number(_EXP_LOW)), number(0.0), value)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, value)


@intrinsic
def exp32(_typing: Any, x: Any) -> Any:
    """Exp of a float32, the one form used everywhere; relative error below 2^-23 on [-87, 88].

    Below -87 the result is 0, above 88 it is exp(88), NaN stays NaN. Cody-Waite reduction by ln 2 in two parts,
    then the Taylor series to the seventh power on |r| <= ln(2) / 2 (its rest is below 6e-9).
    """
    return types.float32(types.float32), lambda _c, b, _s, a: _exp(b, a[0])


@intrinsic
def fma32(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` of float32 rounded once."""
    three = (types.float32, types.float32, types.float32)
    return types.float32(*three), lambda _c, builder, _s, v: fma(builder, v[0], v[1], v[2])


@intrinsic
def larger32(_typing: Any, a: Any, b: Any) -> Any:
    """`b` if it is larger than `a`, else `a`, also where one is NaN; negate for the smaller."""

    def generate(_context: Any, builder: Any, _signature: Any, v: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", v[1], v[0]), v[1], v[0])

    return types.float32(types.float32, types.float32), generate


def _pointer(element: Any) -> Any:
    return lambda _c, b, _s, a: b.inttoptr(a[0], element.as_pointer())


@intrinsic
def f32_at(_typing: Any, address: Any) -> Any:
    """The float32 values at an address, to be indexed."""
    return types.CPointer(types.float32)(types.int64), _pointer(F32)


@intrinsic
def i64_at(_typing: Any, address: Any) -> Any:
    """The int64 values at an address, to be indexed."""
    return types.CPointer(types.int64)(types.int64), _pointer(I64)


@intrinsic
def u8_at(_typing: Any, address: Any) -> Any:
    """The bytes at an address, to be indexed."""
    return types.CPointer(types.uint8)(types.int64), _pointer(I8)


@intrinsic
def i32_at(_typing: Any, address: Any) -> Any:
    """The int32 values at an address, to be indexed."""
    return types.CPointer(types.int32)(types.int64), _pointer(I32)
