"""Dot products of quantised weights with quantised activations: the order of sums of the `fast` numerics.

Activations are signed bytes times one float32 scale per group of 64 columns (`quantised_rows`). Within a group, lane
j of sixteen sums the integer products of columns 4j ... 4j + 3: exact, so AVX-512 VNNI, AVX2 and portable code give
the same integers. Groups are added in rising order by one fma per lane, `lane = fma(integer, scale, lane)`, where the
scale is that of the activations, for `int4-g64` times that of the weights (rounded once). Then the lanes are added by
the tree of `lanes.sum_lanes`. Nothing depends on the number of rows computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from compute_node.kernels import lanes
from compute_node.kernels.dots import Builder, padded_copy, pointers, prefetch_lines, signature_of
from compute_node.kernels.lanes import F32, I8, I16, I32, I64, LANES

__all__ = [
    "V64",
    "QuantisedGroups",
    "add_products",
    "call_named",
    "dot_bytes",
    "dot_quarters",
    "dots_fast_int4",
    "dots_fast_int8",
    "every",
    "factor_at",
    "i64",
    "times",
    "totals_of",
    "vector_at",
    "zero_sums",
]

_BYTES: Final = 64
V64: Final = ir.VectorType(I8, _BYTES)
_SPAN: Final = 8
"""Blocks of `int4-g64`, two groups each, whose sixteen scales are prepared together."""


def every(vector: ir.VectorType, value: int) -> ir.Constant:
    """One integer constant in every lane of a vector type."""
    return ir.Constant(vector, [value] * vector.count)


def call_named(builder: Builder, name: str, result: Any, arguments: list[Any]) -> Any:
    """Calls an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _pick(builder: Builder, vector: Any, places: Sequence[int]) -> Any:
    mask = ir.Constant(ir.VectorType(I32, len(places)), list(places))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _quarters(builder: Builder, unsigned: Any, signed: Any, *, weights_signed: bool) -> Any:
    """Sums of four neighbours of 64 products, by plain integer code."""
    widen = builder.sext if weights_signed else builder.zext
    total: Any = None
    for at in range(4):
        w, x = (_pick(builder, v, range(at, _BYTES, 4)) for v in (unsigned, signed))
        product = builder.mul(widen(w, lanes.V32), builder.sext(x, lanes.V32))
        total = product if total is None else builder.add(total, product)
    return total


def _halves(builder: Builder, unsigned: Any, signed: Any, *, weights_signed: bool) -> Any:
    """The same with AVX2. No pair reaches 2^15: 15 * 127 * 2 for int4, 128 * 127 * 2 for int8 by magnitudes."""
    v32, v16, v8 = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 8)
    parts = []
    for at in (0, 32):
        w, x = (_pick(builder, v, range(at, at + 32)) for v in (unsigned, signed))
        if weights_signed:
            x = call_named(builder, "llvm.x86.avx2.psign.b", v32, [x, w])
            negative = builder.icmp_signed("<", w, every(v32, 0))
            w = builder.select(negative, builder.neg(w), w)
        pairs = call_named(builder, "llvm.x86.avx2.pmadd.ub.sw", v16, [w, x])
        parts.append(call_named(builder, "llvm.x86.avx2.pmadd.wd", v8, [pairs, every(v16, 1)]))
    mask = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
    return builder.shuffle_vector(parts[0], parts[1], mask)


def dot_quarters(builder: Builder, offset: Any, weights: Any, inputs: Any, *, weights_signed: bool, bias: int) -> Any:
    """Sixteen sums of four products of `weights - bias` and `inputs`; `offset` is the sum of `-bias * inputs`.

    Signed weights come as they are and are biased by 128 where the instruction wants unsigned ones.
    """
    if lanes.has_feature("avx512vnni"):
        if weights_signed:
            weights = builder.xor(weights, every(V64, 0x80))
        return call_named(builder, "llvm.x86.avx512.vpdpbusd.512", lanes.V32, [offset, weights, inputs])
    sums = _halves if lanes.has_feature("avx2") else _quarters
    total = sums(builder, weights, inputs, weights_signed=weights_signed)
    return total if weights_signed or bias == 0 else builder.add(total, offset)


def dot_bytes(builder: Builder, factor: int, inputs: Any) -> Any:
    """Sixteen sums of `factor` (0 to 127) times four neighbouring signed bytes."""
    zero = lanes.lane_ints(0)
    return dot_quarters(builder, zero, every(V64, factor), inputs, weights_signed=False, bias=0)


def vector_at(builder: Builder, pointer: Any, kind: Any) -> Any:
    """Loads a vector from a byte pointer; no alignment is assumed."""
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1)


def factor_at(builder: Builder, pointer: Any) -> Any:
    """The float32 at a byte pointer in every lane."""
    return lanes.splat(builder, builder.load(builder.bitcast(pointer, F32.as_pointer()), align=4))


def _widened(builder: Builder, pointer: Any) -> Any:
    """Sixteen float16 at a byte pointer as float32, exactly, also where the processor has no instruction for it."""
    bits = vector_at(builder, pointer, ir.VectorType(I16, LANES))
    if lanes.has_feature("f16c") or lanes.has_feature("avx512f"):
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), lanes.VF32)
    wide = builder.zext(bits, lanes.V32)
    body = builder.shl(builder.and_(wide, lanes.lane_ints(0x7FFF)), lanes.lane_ints(13))
    value = builder.fmul(builder.bitcast(body, lanes.VF32), ir.Constant(lanes.VF32, [2.0**112] * LANES))
    special = builder.icmp_unsigned(">=", body, lanes.lane_ints(0x1F << 23))
    infinite = builder.or_(body, lanes.lane_ints(0x7F800000))
    magnitude = builder.select(special, infinite, builder.bitcast(value, lanes.V32))
    sign = builder.shl(builder.and_(wide, lanes.lane_ints(0x8000)), lanes.lane_ints(16))
    return builder.bitcast(builder.or_(magnitude, sign), lanes.VF32)


class QuantisedGroups:
    """Activation rows: where their scales and their groups of 64 codes and 16 offsets begin."""

    def __init__(self, builder: Builder, rows: list[Any], cols: Any) -> None:
        groups = builder.shl(builder.lshr(builder.add(cols, i64(127)), i64(7)), i64(1))
        padded = builder.and_(builder.add(groups, i64(LANES - 1)), i64(-LANES))
        self._builder = builder
        self.scales = rows
        self._groups = [lanes.offset(builder, row, builder.shl(padded, i64(2))) for row in rows]

    def group(self, row: int, group: Any) -> tuple[Any, Any]:
        """Codes <64 x i8> and offsets <16 x i32> of a group."""
        at = lanes.offset(self._builder, self._groups[row], times(self._builder, group, 2 * _BYTES))
        codes = vector_at(self._builder, at, V64)
        return codes, vector_at(self._builder, lanes.offset(self._builder, at, _BYTES), lanes.V32)


def i64(value: int) -> ir.Constant:
    """An int64 constant."""
    return ir.Constant(I64, value)


def times(builder: Builder, value: Any, factor: int) -> Any:
    """An int64 value times a constant."""
    return builder.mul(value, i64(factor))


def zero_sums(builder: Builder, count: int) -> list[Any]:
    """Accumulators of sixteen float32 lanes, set to zero."""
    cells = [cgutils.alloca_once_value(builder, lanes.zero_lanes()) for _ in range(count)]
    for cell in cells:  # the stack slot is made once, but a sum starts from zero at every call
        builder.store(lanes.zero_lanes(), cell)
    return cells


def add_products(builder: Builder, cell: Any, integers: Any, factor: Any) -> None:
    """Adds sixteen integers times their factors to an accumulator, each with one rounding."""
    value = builder.sitofp(integers, lanes.VF32)
    builder.store(lanes.fma(builder, value, factor, builder.load(cell)), cell)


def totals_of(builder: Builder, cells: list[Any]) -> list[Any]:
    """The finished sums of accumulators."""
    return [lanes.sum_lanes(builder, builder.load(cell)) for cell in cells]


def _int8(builder: Builder, w: list[Any], x: list[Any], cols: Any, after: Any) -> list[Any]:
    rows, sums = QuantisedGroups(builder, x, cols), zero_sums(builder, len(x) * len(w))

    def step(weights: list[Any], group: Any) -> None:
        values = [vector_at(builder, p, V64) for p in weights]
        for row in range(len(x)):
            codes, eighths = rows.group(row, group)
            shifted = builder.shl(eighths, lanes.lane_ints(4))  # from -8 to -128 times the sum
            factor = factor_at(builder, lanes.offset(builder, rows.scales[row], times(builder, group, 4)))
            for column, value in enumerate(values):
                total = dot_quarters(builder, shifted, value, codes, weights_signed=True, bias=128)
                add_products(builder, sums[row * len(w) + column], total, factor)

    whole = builder.lshr(cols, i64(6))
    with cgutils.for_range(builder, whole) as loop:
        prefetch_lines(builder, after, loop.index, len(w))
        at = times(builder, loop.index, _BYTES)
        step([lanes.offset(builder, p, at) for p in w], loop.index)
    tail = builder.and_(cols, i64(_BYTES - 1))
    with builder.if_then(builder.icmp_unsigned("!=", tail, i64(0)), likely=False):
        at = times(builder, whole, _BYTES)
        step([padded_copy(builder, lanes.offset(builder, p, at), tail, I8, _BYTES) for p in w], whole)
    return totals_of(builder, sums)


def _prepare(builder: Builder, table: Any, scales: list[Any], x: list[Any], first: Any, blocks: Any) -> None:
    """Writes the products of weight and activation scales of up to eight blocks to `table`, sixteen per pair."""
    short = builder.icmp_unsigned("<", blocks, i64(_SPAN))
    buffer = cgutils.alloca_once(builder, ir.ArrayType(I16, LANES))
    whole_row = cgutils.alloca_once(builder, I8.as_pointer())
    for column, start in enumerate(scales):
        source = lanes.offset(builder, start, times(builder, first, 4))
        builder.store(source, whole_row)
        with builder.if_then(short, likely=False):  # the sixteen may end beyond the matrix
            builder.store(ir.Constant(ir.ArrayType(I16, LANES), None), buffer)
            typed, target = (
                builder.bitcast(source, I16.as_pointer()),
                builder.bitcast(buffer, I16.as_pointer()),
            )
            with cgutils.for_range(builder, builder.shl(blocks, i64(1))) as loop:
                value = builder.load(builder.gep(typed, [loop.index]), align=1)
                builder.store(value, builder.gep(target, [loop.index]))
            builder.store(builder.bitcast(buffer, I8.as_pointer()), whole_row)
        wide = _widened(builder, builder.load(whole_row))
        for row, inputs in enumerate(x):
            own = lanes.lanes_at(builder, lanes.offset(builder, inputs, times(builder, first, 8)))
            place = lanes.offset(builder, table, (row * len(scales) + column) * LANES * 4)
            target = builder.bitcast(place, lanes.VF32.as_pointer())
            builder.store(builder.fmul(wide, own), target, align=4)


def _int4(builder: Builder, w: list[Any], s: list[Any], x: list[Any], cols: Any, after: Any) -> list[Any]:
    rows, sums = QuantisedGroups(builder, x, cols), zero_sums(builder, len(x) * len(w))
    table = cgutils.alloca_once(builder, ir.ArrayType(F32, len(x) * len(w) * LANES))
    table = builder.bitcast(table, I8.as_pointer())
    total_blocks = builder.lshr(builder.add(cols, i64(127)), i64(7))
    spans = builder.lshr(builder.add(total_blocks, i64(_SPAN - 1)), i64(3))

    def block(number: Any, inside: Any) -> None:
        at = times(builder, number, _BYTES)
        raw = [vector_at(builder, lanes.offset(builder, p, at), V64) for p in w]
        for half in range(2):
            codes = [builder.lshr(r, every(V64, 4)) if half else builder.and_(r, every(V64, 15)) for r in raw]
            group = builder.add(builder.shl(number, i64(1)), i64(half))
            lane = builder.add(times(builder, inside, 8), i64(4 * half))
            for row in range(len(x)):
                values, eighths = rows.group(row, group)
                for column, code in enumerate(codes):
                    pair = row * len(w) + column
                    factor = factor_at(builder, lanes.offset(builder, table, builder.add(lane, i64(pair * LANES * 4))))
                    integers = dot_quarters(builder, eighths, code, values, weights_signed=False, bias=8)
                    add_products(builder, sums[pair], integers, factor)

    with cgutils.for_range(builder, spans) as span:
        first = times(builder, span.index, _SPAN)
        left = builder.sub(total_blocks, first)
        blocks = builder.select(builder.icmp_unsigned("<", left, i64(_SPAN)), left, i64(_SPAN))
        _prepare(builder, table, s, x, first, blocks)
        with cgutils.for_range(builder, blocks) as loop:
            number = builder.add(first, loop.index)
            prefetch_lines(builder, after, number, len(w))
            block(number, loop.index)
    return totals_of(builder, sums)


@intrinsic
def dots_fast_int8(_typing: Any, w: Any, x: Any, cols: Any, after: Any) -> Any:
    """Dot products of int8 weight rows at addresses `w` with quantised rows at addresses `x`, before the row's scale.

    `after` is where the weights of the next call begin; their lines are asked for on the way.
    """

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
        ahead = builder.inttoptr(arguments[3], I8.as_pointer())
        totals = _int8(builder, pointers(builder, arguments[0]), pointers(builder, arguments[1]), arguments[2], ahead)
        return context.make_tuple(builder, signature.return_type, totals)

    return signature_of(w, x, cols, after), generate


@intrinsic
def dots_fast_int4(_typing: Any, w: Any, s: Any, x: Any, cols: Any, after: Any) -> Any:
    """The same for `int4-g64` weights, whose float16 scales begin at addresses `s`."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
        ahead = builder.inttoptr(arguments[4], I8.as_pointer())
        data, scales, inputs = (pointers(builder, a) for a in arguments[:3])
        totals = _int4(builder, data, scales, inputs, arguments[3], ahead)
        return context.make_tuple(builder, signature.return_type, totals)

    return signature_of(w, s, x, cols, after), generate
