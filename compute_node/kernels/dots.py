"""Dot products of rows of weights with rows of activations: the order of sums that every result rests on.

Lane j of sixteen accumulates the products of columns j, j + 16, j + 32 ... in rising order by fused multiply-add;
columns beyond the end count as zeros; the lanes are then added by one fixed tree. It is the same for any number of
rows computed together, so a row's result does not depend on its company. Weights are widened to float32 exactly.
`int4-g64` sums each group of 64 columns from zero and adds it, times the group's scale, by one more fma. Formats with
scales for small blocks are in `block_dots`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from compute_node.kernels import lanes
from compute_node.kernels.lanes import F32, I8, I16, I32, I64, LANES

__all__ = [
    "LINE",
    "Builder",
    "Dots",
    "LaneSums",
    "dot",
    "dots_bf16",
    "dots_f32",
    "dots_int8",
    "flat_bf16",
    "flat_f32",
    "flat_int8",
    "grouped_int4",
    "padded_copy",
    "pointers",
    "prefetch_lines",
    "tile_of",
]

BLOCK: Final = 128
"""Columns in 64 bytes of `int4-g64`: two groups."""

LINE: Final = 64
"""Bytes of a cache line."""

Builder = Any  # llvmlite has no types
Widen = Callable[[Builder, Any], Any]
Dots = Callable[[Builder, list[Any], list[Any], list[Any], Any, Any], list[Any]]
"""Makes the totals of a few weight rows with all activation rows, activation row by activation row.

It is given byte pointers to the weight rows, to their scales and to the activation rows, the columns, and where the
weights begin whose lines are to be asked for.
"""

_PAIRS: Final = 16 if lanes.has_feature("avx512f") else 4
"""Pairs of an activation row and a weight row whose accumulators stay in registers together."""


def tile_of(rows: int) -> int:
    """Weight rows that are computed together with so many activation rows, at most four."""
    return max(1, min(4, _PAIRS // rows))


def _bf16(builder: Builder, raw: Any) -> Any:
    wide = builder.shl(builder.zext(raw, lanes.V32), lanes.lane_ints(16))
    return builder.bitcast(wide, lanes.VF32)


def _int8(builder: Builder, raw: Any) -> Any:
    return builder.sitofp(builder.sext(raw, lanes.V32), lanes.VF32)


def padded_copy(builder: Builder, source: Any, count: Any, element: Any, length: int) -> Any:
    """A byte pointer to `length` elements on the stack: `count` of them from `source`, then zeros."""
    kind = ir.ArrayType(element, length)
    buffer = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, None), buffer)
    target = builder.bitcast(buffer, element.as_pointer())
    typed = builder.bitcast(source, element.as_pointer())
    with cgutils.for_range(builder, count) as loop:
        value = builder.load(builder.gep(typed, [loop.index]), align=1)
        builder.store(value, builder.gep(target, [loop.index]))
    return builder.bitcast(buffer, I8.as_pointer())


def prefetch_lines(builder: Builder, start: Any, step: Any, lines: int) -> None:
    """Asks for the lines of step number `step`, where each step reads `lines` of them one after the other."""
    at = lanes.offset(builder, start, builder.mul(step, ir.Constant(I64, lines * LINE)))
    for line in range(lines):
        lanes.prefetch(builder, lanes.offset(builder, at, line * LINE))


class LaneSums:
    """Accumulators of sixteen lanes for each pair of an activation row and a weight row."""

    def __init__(self, builder: Builder, rows: int, columns: int) -> None:
        self.builder = builder
        zero = lanes.zero_lanes()
        self.cells = [[cgutils.alloca_once_value(builder, zero) for _ in range(columns)] for _ in range(rows)]
        for row in self.cells:  # the stack slot is made once, but a sum starts from zero at every call
            for cell in row:
                builder.store(zero, cell)

    def add(self, row: int, column: int, a: Any, b: Any) -> None:
        """Adds `a * b` lane by lane with one rounding."""
        cell = self.cells[row][column]
        self.builder.store(lanes.fma(self.builder, a, b, self.builder.load(cell)), cell)

    def totals(self) -> list[Any]:
        """The finished sums, row by row."""
        return [lanes.sum_lanes(self.builder, self.builder.load(cell)) for row in self.cells for cell in row]


def _flat(
    element: Any,
    widen: Widen | None,
    asks: bool,
    builder: Builder,
    w: list[Any],
    _scales: list[Any],
    x: list[Any],
    cols: Any,
    after: Any,
) -> list[Any]:
    """Dot products where one weight is one element of memory, before the row's scale.

    Rows of two bytes and more to a weight are found by the processor itself: asking for them took 8 % more time.
    """
    size = 4 if element == F32 else element.width // 8
    sums = LaneSums(builder, len(x), len(w))

    def step(weights: list[Any], inputs: list[Any]) -> None:
        values = [lanes.lanes_at(builder, p) for p in inputs]
        for column, pointer in enumerate(weights):
            raw = lanes.lanes_at(builder, pointer, element)
            weight = raw if widen is None else widen(builder, raw)
            for row, value in enumerate(values):
                sums.add(row, column, weight, value)

    with cgutils.for_range(builder, builder.udiv(cols, ir.Constant(I64, LANES))) as loop:
        at_w = builder.mul(loop.index, ir.Constant(I64, LANES * size))
        at_x = builder.mul(loop.index, ir.Constant(I64, LANES * 4))
        if asks:
            prefetch_lines(builder, after, loop.index, -(-LANES * size * len(w) // LINE))
        step([lanes.offset(builder, p, at_w) for p in w], [lanes.offset(builder, p, at_x) for p in x])
    tail = builder.urem(cols, ir.Constant(I64, LANES))
    with builder.if_then(builder.icmp_unsigned("!=", tail, ir.Constant(I64, 0)), likely=False):
        done = builder.sub(cols, tail)
        at_w, at_x = builder.mul(done, ir.Constant(I64, size)), builder.mul(done, ir.Constant(I64, 4))
        step(
            [padded_copy(builder, lanes.offset(builder, p, at_w), tail, element, LANES) for p in w],
            [padded_copy(builder, lanes.offset(builder, p, at_x), tail, F32, LANES) for p in x],
        )
    return sums.totals()


def _half_scale(builder: Builder, pointer: Any) -> Any:
    """The float16 at a byte pointer as float32, exactly, also where the processor has no instruction for it."""
    bits = builder.load(builder.bitcast(pointer, I16.as_pointer()), align=1)
    if lanes.has_feature("f16c") or lanes.has_feature("avx512f"):
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), F32)
    wide = builder.zext(bits, I32)
    body = builder.shl(builder.and_(wide, ir.Constant(I32, 0x7FFF)), ir.Constant(I32, 13))
    value = builder.fmul(builder.bitcast(body, F32), ir.Constant(F32, 2.0**112))
    special = builder.icmp_unsigned(">=", body, ir.Constant(I32, 0x1F << 23))
    infinite = builder.or_(body, ir.Constant(I32, 0x7F800000))
    magnitude = builder.select(special, infinite, builder.bitcast(value, I32))
    sign = builder.shl(builder.and_(wide, ir.Constant(I32, 0x8000)), ir.Constant(I32, 16))
    return builder.bitcast(builder.or_(magnitude, sign), F32)


def _codes(builder: Builder, pointer: Any, *, high: bool) -> list[Any]:
    """The codes of one group of 64 columns, less 8, as four times sixteen float32: low or high halves of 64 bytes."""
    if lanes.has_feature("avx512f"):  # a register looked up by the low four bits of each lane
        table = ir.Constant(lanes.VF32, [float(code - 8) for code in range(16)])
        kind = ir.FunctionType(lanes.VF32, [lanes.VF32, lanes.V32])
        look_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
        wide = [
            builder.zext(lanes.lanes_at(builder, lanes.offset(builder, pointer, at), I8), lanes.V32)
            for at in range(0, 64, LANES)
        ]
        return [builder.call(look_up, [table, builder.lshr(raw, lanes.lane_ints(4)) if high else raw]) for raw in wide]
    # 32 bytes at a time as long as they are bytes.
    half = ir.VectorType(I8, 32)
    found = []
    for at in (0, 32):
        raw = builder.load(builder.bitcast(lanes.offset(builder, pointer, at), half.as_pointer()), align=1)
        mask, eight, four = (ir.Constant(half, [value] * 32) for value in (15, 8, 4))
        code = builder.sub(builder.lshr(raw, four) if high else builder.and_(raw, mask), eight)
        for first in (0, LANES):
            order = ir.Constant(ir.VectorType(I32, LANES), list(range(first, first + LANES)))
            part = builder.shuffle_vector(code, ir.Constant(half, ir.Undefined), order)
            found.append(builder.sitofp(builder.sext(part, lanes.V32), lanes.VF32))
    return found


def grouped_int4(builder: Builder, w: list[Any], s: list[Any], x: list[Any], cols: Any, after: Any) -> list[Any]:
    """Dot products of `int4-g64`: per group a sum from zero, then added times the group's scale."""
    sums = LaneSums(builder, len(x), len(w))
    chunks = range(0, 64, LANES)

    def step(weights: list[Any], scales: list[Any], inputs: list[Any]) -> None:
        for column, (pointer, scale) in enumerate(zip(weights, scales, strict=True)):
            for group in range(2):
                factor = lanes.splat(builder, _half_scale(builder, lanes.offset(builder, scale, 2 * group)))
                codes = _codes(builder, pointer, high=group == 1)
                for row, source in enumerate(inputs):
                    partial: Any = lanes.zero_lanes()
                    for code, at in zip(codes, chunks, strict=True):
                        value = lanes.lanes_at(builder, lanes.offset(builder, source, group * 256 + at * 4))
                        partial = lanes.fma(builder, code, value, partial)
                    sums.add(row, column, factor, partial)

    def moved(pointers: list[Any], block: Any, size: int) -> list[Any]:
        at = builder.mul(block, ir.Constant(I64, size))
        return [lanes.offset(builder, p, at) for p in pointers]

    whole = builder.udiv(cols, ir.Constant(I64, BLOCK))
    with cgutils.for_range(builder, whole) as loop:
        prefetch_lines(builder, after, loop.index, len(w))
        step(moved(w, loop.index, 64), moved(s, loop.index, 4), moved(x, loop.index, BLOCK * 4))
    tail = builder.urem(cols, ir.Constant(I64, BLOCK))
    with builder.if_then(builder.icmp_unsigned("!=", tail, ir.Constant(I64, 0)), likely=False):
        rest = [padded_copy(builder, p, tail, F32, BLOCK) for p in moved(x, whole, BLOCK * 4)]
        step(moved(w, whole, 64), moved(s, whole, 4), rest)
    return sums.totals()


def pointers(builder: Builder, addresses: Any) -> list[Any]:
    """Byte pointers from a tuple of int64 addresses."""
    return [builder.inttoptr(a, I8.as_pointer()) for a in cgutils.unpack_tuple(builder, addresses)]


flat_f32: Final[Dots] = partial(_flat, F32, None, False)
flat_bf16: Final[Dots] = partial(_flat, I16, _bf16, False)
flat_int8: Final[Dots] = partial(_flat, I8, _int8, True)


def _signature(w: Any, x: Any, cols: Any, after: Any) -> Any:
    """Addresses in tuples of int64; the result is a tuple of float32, one per pair, row by row."""
    return types.UniTuple(types.float32, w.count * x.count)(w, x, cols, after)


def _in_tiles(dots: Dots) -> Callable[..., Any]:
    """The body of an intrinsic whose weight rows, one or four, are no more at a time than registers can follow.

    The code of `dots` is made once and runs for one group of weight rows after the other, so a weight is loaded and
    unpacked once for all activation rows.
    """

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
        rows, x = (pointers(builder, value) for value in arguments[:2])
        cols, after = arguments[2], builder.inttoptr(arguments[3], I8.as_pointer())
        count, size = len(rows), min(len(rows), tile_of(len(x)))
        if size == count:
            return context.make_tuple(builder, signature.return_type, dots(builder, rows, [], x, cols, after))
        table = cgutils.alloca_once(builder, ir.ArrayType(I8.as_pointer(), count))
        for number, pointer in enumerate(rows):
            builder.store(pointer, cgutils.gep_inbounds(builder, table, 0, number))
        found = cgutils.alloca_once(builder, ir.ArrayType(F32, count * len(x)))
        with cgutils.for_range(builder, ir.Constant(I64, count // size)) as loop:
            first = builder.mul(loop.index, ir.Constant(I64, size))
            places = [builder.add(first, ir.Constant(I64, number)) for number in range(size)]
            some = [builder.load(cgutils.gep_inbounds(builder, table, 0, place)) for place in places]
            done = builder.sub(builder.ptrtoint(some[0], I64), builder.ptrtoint(rows[0], I64))
            totals = dots(builder, some, [], x, cols, lanes.offset(builder, after, done))
            for number, total in enumerate(totals):
                row, place = divmod(number, size)
                at = builder.add(places[place], ir.Constant(I64, row * count))
                builder.store(total, cgutils.gep_inbounds(builder, found, 0, at))
        sums = [builder.load(cgutils.gep_inbounds(builder, found, 0, at)) for at in range(count * len(x))]
        return context.make_tuple(builder, signature.return_type, sums)

    return generate


@intrinsic
def dots_f32(_typing: Any, w: Any, x: Any, cols: Any, after: Any) -> Any:
    """Dot products of float32 weight rows at addresses `w` with activation rows at addresses `x`.

    `after` is where the weights of the next call begin; their lines are asked for on the way.
    """
    return _signature(w, x, cols, after), _in_tiles(flat_f32)


@intrinsic
def dots_bf16(_typing: Any, w: Any, x: Any, cols: Any, after: Any) -> Any:
    """The same for bf16 weights."""
    return _signature(w, x, cols, after), _in_tiles(flat_bf16)


@intrinsic
def dots_int8(_typing: Any, w: Any, x: Any, cols: Any, after: Any) -> Any:
    """The same for int8 weights, before the row's scale."""
    return _signature(w, x, cols, after), _in_tiles(flat_int8)


@njit(nogil=True, cache=True, error_model="numpy")
def dot(a: int, b: int, length: int) -> Any:
    """The dot product of two float32 vectors at addresses."""
    return dots_f32((a,), (b,), length, a)[0]
