"""Dot products of quantised weights with quantised activations: the order of sums of the `fast` numerics.

Activations are signed bytes times one float32 scale per group of 64 columns (`quantised_rows`). Within a group, lane
j of eight sums the integer products of columns 4j ... 4j + 3 and 32 + 4j ... 32 + 4j + 3: exact, so AVX-512 VNNI, AVX2
and portable code give the same integers. Groups are added in rising order by one fma per lane, `lane = fma(integer,
scale, lane)`, where the scale is that of the activations, for `int4-g64` times that of the weights (rounded once).

Codes of `int4-g64` are multiplied as they are, 0 to 15. That they stand for 8 less is made good by sixteen lanes more:
lane g mod 16 of them adds, by one fma, the weights' scale of group g times the row's offset of the group, which is -8
times the sum of its codes times its scale. Lanes j and j + 8 of these, added, are added to lane j of the eight; then
the eight are added by the tree of `lanes.sum_lanes`. Nothing depends on the number of rows computed together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils

from compute_node.kernels import lanes
from compute_node.kernels.dots import LINE, Builder, padded_copy, prefetch_lines, tile_of
from compute_node.kernels.lanes import F32, I8, I16, I32, I64, LANES

__all__ = [
    "HALF",
    "WIDE_GROUPS",
    "Fixes",
    "QuantisedGroups",
    "add_products",
    "call_named",
    "dot_halves",
    "every",
    "factor_at",
    "fast_int4",
    "fast_int8",
    "fast_int8_wide",
    "halves_at",
    "i64",
    "int4_tile",
    "times",
    "totals_of",
    "vector_at",
    "widened",
    "zero_sums",
]

_BYTES: Final = 64
_SUMS: Final = 8
_SPAN: Final = 8
"""Blocks of `int4-g64`, two groups each, whose sixteen scales are prepared together."""

_IN_REGISTERS: Final = 8
"""Sums of pairs that stay in half of the sixteen registers of AVX2."""

WIDE_GROUPS: Final = 76
"""Most groups of rows that are widened; `matmul` does not compute more than two longer rows together."""

HALF: Final = ir.VectorType(I8, 32)
_V8: Final = ir.VectorType(I32, _SUMS)
_VF8: Final = ir.VectorType(F32, _SUMS)
_V16: Final = ir.VectorType(I16, LANES)


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


def _plain(builder: Builder, weights: Any, inputs: Any, *, weights_signed: bool) -> Any:
    """Sums of four neighbours of 32 products, by plain integer code."""
    widen = builder.sext if weights_signed else builder.zext
    total: Any = None
    for at in range(4):
        w, x = (_pick(builder, v, range(at, HALF.count, 4)) for v in (weights, inputs))
        product = builder.mul(widen(w, _V8), builder.sext(x, _V8))
        total = product if total is None else builder.add(total, product)
    return total


def _as_unsigned(builder: Builder, weights: Any, inputs: Any) -> tuple[Any, Any]:
    """Magnitudes of signed weights, and inputs with their signs: the same products."""
    signed = call_named(builder, "llvm.x86.avx2.psign.b", HALF, [inputs, weights])
    negative = builder.icmp_signed("<", weights, every(HALF, 0))
    return builder.select(negative, builder.neg(weights), weights), signed


def dot_halves(builder: Builder, weights: list[Any], inputs: list[Any], *, weights_signed: bool) -> Any:
    """Eight sums of products: lane j has columns 4j ... 4j + 3 of each half.

    Args:
        builder: of the code.
        weights: one or two vectors of 32 bytes, signed ones or 0 to 31.
        inputs: as many vectors of signed bytes, none of them -128.
        weights_signed: which of the two.
    """
    pairs = list(zip(weights, inputs, strict=True))
    if not lanes.has_feature("avx2"):
        sums = [_plain(builder, w, x, weights_signed=weights_signed) for w, x in pairs]
        return sums[0] if len(sums) == 1 else builder.add(*sums)
    if weights_signed:
        pairs = [_as_unsigned(builder, w, x) for w, x in pairs]
    if lanes.has_feature("avx512vnni") and lanes.has_feature("avx512vl"):
        total: Any = every(_V8, 0)
        for w, x in pairs:
            total = call_named(builder, "llvm.x86.avx512.vpdpbusd.256", _V8, [total, w, x])
        return total
    # Two neighbours stay below 2^15: 2 * 128 * 127. Four of unsigned weights do so too: 4 * 31 * 127.
    found = [call_named(builder, "llvm.x86.avx2.pmadd.ub.sw", _V16, [w, x]) for w, x in pairs]
    if len(found) == 2 and not weights_signed:
        found = [builder.add(*found)]
    sums = [call_named(builder, "llvm.x86.avx2.pmadd.wd", _V8, [p, every(_V16, 1)]) for p in found]
    return sums[0] if len(sums) == 1 else builder.add(*sums)


def vector_at(builder: Builder, pointer: Any, kind: Any) -> Any:
    """Loads a vector from a byte pointer; no alignment is assumed."""
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1)


def halves_at(builder: Builder, pointer: Any) -> list[Any]:
    """The 64 bytes at a byte pointer in two vectors."""
    return [vector_at(builder, lanes.offset(builder, pointer, at), HALF) for at in (0, HALF.count)]


def factor_at(builder: Builder, pointer: Any, count: int = LANES) -> Any:
    """The float32 at a byte pointer in every one of so many lanes."""
    return lanes.splat(builder, builder.load(builder.bitcast(pointer, F32.as_pointer()), align=4), count)


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
    """Activation rows: where their scales, offsets and codes begin; see `quantised_rows.row_layout`."""

    def __init__(self, builder: Builder, rows: list[Any], cols: Any) -> None:
        groups = builder.shl(builder.lshr(builder.add(cols, i64(127)), i64(7)), i64(1))
        padded = builder.and_(builder.add(groups, i64(LANES - 1)), i64(-LANES))
        self._builder = builder
        self.scales = rows
        self.offsets = [lanes.offset(builder, row, times(builder, padded, 4)) for row in rows]
        self.half_offsets = [lanes.offset(builder, row, times(builder, padded, 8)) for row in rows]
        self._codes = [lanes.offset(builder, row, times(builder, padded, 16)) for row in rows]

    def group(self, row: int, group: Any) -> list[Any]:
        """The codes of a group, two vectors of 32."""
        at = times(self._builder, group, _BYTES)
        return halves_at(self._builder, lanes.offset(self._builder, self._codes[row], at))


def i64(value: int) -> ir.Constant:
    """An int64 constant."""
    return ir.Constant(I64, value)


def times(builder: Builder, value: Any, factor: int) -> Any:
    """An int64 value times a constant."""
    return builder.mul(value, i64(factor))


def zero_sums(builder: Builder, count: int, width: int = _SUMS) -> list[Any]:
    """Accumulators of so many float32 lanes, set to zero."""
    zero = ir.Constant(ir.VectorType(F32, width), [0.0] * width)
    cells = [cgutils.alloca_once_value(builder, zero) for _ in range(count)]
    for cell in cells:  # the stack slot is made once, but a sum starts from zero at every call
        builder.store(zero, cell)
    return cells


def add_products(builder: Builder, cell: Any, integers: Any, factor: Any) -> None:
    """Adds eight integers times their factor to an accumulator, each with one rounding."""
    value = builder.sitofp(integers, _VF8)
    builder.store(lanes.fma(builder, value, factor, builder.load(cell)), cell)


class Fixes:
    """Sixteen lanes for each pair that make good what unsigned codes stand for too much."""

    def __init__(self, builder: Builder, pairs: int) -> None:
        self._builder, self._cells = builder, zero_sums(builder, pairs, LANES)

    def add(self, pair: int, scales: Any, offsets: Any) -> None:
        """Adds sixteen scales of weights times offsets of activations."""
        cell = self._cells[pair]
        self._builder.store(lanes.fma(self._builder, scales, offsets, self._builder.load(cell)), cell)

    def apply(self, cells: list[Any]) -> None:
        """Adds the lanes to those of the accumulators."""
        builder = self._builder
        for own, cell in zip(self._cells, cells, strict=True):
            low, high = (_pick(builder, builder.load(own), range(at, at + _SUMS)) for at in (0, _SUMS))
            builder.store(builder.fadd(builder.load(cell), builder.fadd(low, high)), cell)


def totals_of(builder: Builder, cells: list[Any]) -> list[Any]:
    """The finished sums of accumulators."""
    return [lanes.sum_lanes(builder, builder.load(cell)) for cell in cells]


def _each_group(builder: Builder, w: list[Any], cols: Any, after: Any, step: Callable[[list[Any], Any], None]) -> None:
    """Calls `step` with byte pointers to 64 int8 of each weight row, and the number of their group."""
    whole = builder.lshr(cols, i64(6))
    with cgutils.for_range(builder, whole) as loop:
        prefetch_lines(builder, after, loop.index, len(w))
        at = times(builder, loop.index, _BYTES)
        step([lanes.offset(builder, p, at) for p in w], loop.index)
    tail = builder.and_(cols, i64(_BYTES - 1))
    with builder.if_then(builder.icmp_unsigned("!=", tail, i64(0)), likely=False):
        at = times(builder, whole, _BYTES)
        step([padded_copy(builder, lanes.offset(builder, p, at), tail, I8, _BYTES) for p in w], whole)


def _even_and_odd(builder: Builder, packed: Any) -> list[Any]:
    """Of 32 signed bytes, those at even places and those at odd ones, as sixteen int16 each."""
    wide, eight = builder.bitcast(packed, _V16), every(_V16, 8)
    return [builder.ashr(builder.shl(wide, eight), eight), builder.ashr(wide, eight)]


def widened(builder: Builder, x: list[Any], cols: Any) -> list[Any]:
    """Byte pointers to the codes of quantised rows as int16: 64 per group, even and odd places of 32 in turn.

    They lie on the stack, so rows have at most `WIDE_GROUPS` groups.
    """
    rows, groups = QuantisedGroups(builder, x, cols), builder.lshr(builder.add(cols, i64(_BYTES - 1)), i64(6))
    first = cgutils.alloca_once(builder, I8, size=i64(len(x) * WIDE_GROUPS * 2 * _BYTES))
    first.align = LINE
    found = [lanes.offset(builder, first, times(builder, groups, row * 2 * _BYTES)) for row in range(len(x))]
    with cgutils.for_range(builder, groups) as loop:
        for row, start in enumerate(found):
            target = lanes.offset(builder, start, times(builder, loop.index, 2 * _BYTES))
            parts = [part for half in rows.group(row, loop.index) for part in _even_and_odd(builder, half)]
            for number, part in enumerate(parts):
                place = builder.bitcast(lanes.offset(builder, target, number * 32), _V16.as_pointer())
                builder.store(part, place, align=32)
    return found


def fast_int8_wide(builder: Builder, w: list[Any], wide: list[Any], x: list[Any], cols: Any, after: Any) -> list[Any]:
    """The same as `fast_int8`, with rows as `widened` left them in place of scales: products of two int16.

    It takes three instructions for sixteen products where signs cost a fourth, and pays where several rows share a
    widened weight.
    """
    sums, scales = zero_sums(builder, len(x) * len(w)), QuantisedGroups(builder, x, cols).scales

    def step(weights: list[Any], group: Any) -> None:
        at = times(builder, group, 2 * _BYTES)
        for column, pointer in enumerate(weights):
            parts = [part for half in halves_at(builder, pointer) for part in _even_and_odd(builder, half)]
            for row, start in enumerate(wide):
                total: Any = None
                for number, part in enumerate(parts):
                    value = vector_at(builder, lanes.offset(builder, start, builder.add(at, i64(number * 32))), _V16)
                    product = call_named(builder, "llvm.x86.avx2.pmadd.wd", _V8, [part, value])
                    total = product if total is None else builder.add(total, product)
                factor = factor_at(builder, lanes.offset(builder, scales[row], times(builder, group, 4)), _SUMS)
                add_products(builder, sums[row * len(w) + column], total, factor)

    _each_group(builder, w, cols, after, step)
    return totals_of(builder, sums)


def fast_int8(builder: Builder, w: list[Any], _scales: list[Any], x: list[Any], cols: Any, after: Any) -> list[Any]:
    """Dot products of int8 weight rows with quantised rows, before the row's scale."""
    rows, sums = QuantisedGroups(builder, x, cols), zero_sums(builder, len(x) * len(w))

    def step(weights: list[Any], group: Any) -> None:
        for column, pointer in enumerate(weights):
            value = halves_at(builder, pointer)
            for row in range(len(x)):
                factor = factor_at(builder, lanes.offset(builder, rows.scales[row], times(builder, group, 4)), _SUMS)
                total = dot_halves(builder, value, rows.group(row, group), weights_signed=True)
                add_products(builder, sums[row * len(w) + column], total, factor)

    _each_group(builder, w, cols, after, step)
    return totals_of(builder, sums)


def _prepare(
    builder: Builder, table: Any, fixes: Fixes, scales: list[Any], rows: QuantisedGroups, first: Any, blocks: Any
) -> None:
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
        at = times(builder, first, 8)
        for row, (inputs, offsets) in enumerate(zip(rows.scales, rows.offsets, strict=True)):
            own = lanes.lanes_at(builder, lanes.offset(builder, inputs, at))
            fixes.add(row * len(scales) + column, wide, lanes.lanes_at(builder, lanes.offset(builder, offsets, at)))
            place = lanes.offset(builder, table, (row * len(scales) + column) * LANES * 4)
            target = builder.bitcast(place, lanes.VF32.as_pointer())
            builder.store(builder.fmul(wide, own), target, align=4)


def int4_tile(rows: int) -> int:
    """Weight rows of `int4-g64` that are computed together with so many activation rows.

    With sixteen registers only their sums stay in them: activations are loaded again for each weight row, which costs
    nothing where a product takes its operand from the first-level cache.
    """
    return tile_of(rows) if lanes.has_feature("avx512f") else max(1, min(4, _IN_REGISTERS // rows))


def _forget(builder: Builder) -> None:
    """Keeps the compiler from holding what it loaded before for what comes behind; no instruction is made of it.

    Else it keeps all activations of a block, and the sums go to memory and back in every step.
    """
    if not lanes.has_feature("avx512f"):
        builder.fence("acq_rel", targetscope="singlethread")


def _nibbles(builder: Builder, packed: Any, *, high: bool) -> Any:
    return builder.lshr(packed, every(HALF, 4)) if high else builder.and_(packed, every(HALF, 15))


def fast_int4(builder: Builder, w: list[Any], s: list[Any], x: list[Any], cols: Any, after: Any) -> list[Any]:
    """Dot products of `int4-g64` weight rows, whose scales are float16, with quantised rows."""
    rows, sums = QuantisedGroups(builder, x, cols), zero_sums(builder, len(x) * len(w))
    fixes = Fixes(builder, len(sums))
    table = cgutils.alloca_once(builder, ir.ArrayType(F32, len(x) * len(w) * LANES))
    table.align = LINE  # no store then crosses a line, from which single factors could not be forwarded
    table = builder.bitcast(table, I8.as_pointer())
    total_blocks = builder.lshr(builder.add(cols, i64(127)), i64(7))
    spans = builder.lshr(builder.add(total_blocks, i64(_SPAN - 1)), i64(3))

    def block(number: Any, inside: Any) -> None:
        at = times(builder, number, _BYTES)
        for column, start in enumerate(w):
            raw = halves_at(builder, lanes.offset(builder, start, at))
            for half in range(2):
                codes = [_nibbles(builder, part, high=half == 1) for part in raw]
                group = builder.add(builder.shl(number, i64(1)), i64(half))
                lane = builder.add(times(builder, inside, 8), i64(4 * half))
                for row in range(len(x)):
                    pair = row * len(w) + column
                    place = lanes.offset(builder, table, builder.add(lane, i64(pair * LANES * 4)))
                    factor = factor_at(builder, place, _SUMS)
                    integers = dot_halves(builder, codes, rows.group(row, group), weights_signed=False)
                    add_products(builder, sums[pair], integers, factor)
            _forget(builder)

    with cgutils.for_range(builder, spans) as span:
        first = times(builder, span.index, _SPAN)
        left = builder.sub(total_blocks, first)
        blocks = builder.select(builder.icmp_unsigned("<", left, i64(_SPAN)), left, i64(_SPAN))
        _prepare(builder, table, fixes, s, rows, first, blocks)
        with cgutils.for_range(builder, blocks) as loop:
            number = builder.add(first, loop.index)
            prefetch_lines(builder, after, number, len(w))
            block(number, loop.index)
    fixes.apply(sums)
    return totals_of(builder, sums)
