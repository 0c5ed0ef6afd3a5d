"""Codes and scales of `fp8-e4m3`, `mxfp4` and `int4-g32` in registers, as LLVM code.

Whatever processor decodes them, a code and a scale give the same float32, and every bit pattern gives one. What a
processor lacks is made of integer code that comes to the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils

from compute_node.kernels import lanes
from compute_node.kernels.dots import LINE, Builder
from compute_node.kernels.integer_dots import call_named, every, i64, times, vector_at
from compute_node.kernels.lanes import F32, I8, I16, I32, I64, LANES

__all__ = [
    "BLOCK_BYTES",
    "SPAN",
    "V8",
    "ScaleTable",
    "float8_values",
    "nibbles_at",
    "spoil_totals",
    "twice_float4",
    "widen_bf16_scales",
    "widen_exponents",
]

BLOCK_BYTES: Final = 32
"""Bytes of a block of 64 columns: the low nibbles are one group of 32 columns, the high ones the next."""
SPAN: Final = 8
"""Blocks whose sixteen scales are widened together."""

V8: Final = ir.VectorType(I8, BLOCK_BYTES)
_V16: Final = ir.VectorType(I16, LANES)
_B16: Final = ir.VectorType(I8, LANES)
_NO_NUMBER: Final = 0x7F
_TWICE: Final = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitude of each 4-bit float: whole numbers."""


def nibbles_at(builder: Builder, pointer: Any) -> tuple[Any, Any]:
    """The codes of a block, in two vectors of 32 bytes: its first group and its second."""
    raw = vector_at(builder, pointer, V8)
    return builder.and_(raw, every(V8, 15)), builder.lshr(raw, every(V8, 4))


def twice_float4(builder: Builder, codes: Any, bias: int) -> Any:
    """Twice the value of 32 4-bit floats, plus `bias`, as bytes. Minus zero is zero."""
    if lanes.has_feature("avx2"):
        table = [value + bias for value in (*_TWICE, *(-value for value in _TWICE))]
        both = ir.Constant(V8, [value & 255 for value in table * 2])
        return call_named(builder, "llvm.x86.avx2.pshuf.b", V8, [both, codes])
    rank = builder.and_(codes, every(V8, 7))
    total = rank
    for place, more in ((5, 1), (6, 2), (7, 5)):  # the ranks are their own values up to 4
        extra = builder.select(builder.icmp_unsigned("==", rank, every(V8, place)), every(V8, more), every(V8, 0))
        total = builder.add(total, extra)
    negative = builder.icmp_unsigned("!=", builder.and_(codes, every(V8, 8)), every(V8, 0))
    return builder.add(builder.select(negative, builder.neg(total), total), every(V8, bias))


def float8_values(builder: Builder, codes: Any) -> Any:
    """1/256 of the value of sixteen 8-bit floats (E4M3), as float32, exactly; 480/256 for the two that are none.

    Their bits, moved, are those of a half float of 1/256 of the value, also for the smallest ones.
    """
    if lanes.has_feature("f16c") or lanes.has_feature("avx512f"):
        moved = builder.shl(builder.sext(codes, _V16), every(_V16, 7))
        half = builder.and_(moved, every(_V16, 0xBFFF))
        return builder.fpext(builder.bitcast(half, ir.VectorType(ir.HalfType(), LANES)), lanes.VF32)
    wide = builder.zext(codes, lanes.V32)
    body = builder.shl(builder.and_(wide, lanes.lane_ints(0x7F)), lanes.lane_ints(20))
    value = builder.fmul(builder.bitcast(body, lanes.VF32), ir.Constant(lanes.VF32, [2.0**112] * LANES))
    sign = builder.shl(builder.and_(wide, lanes.lane_ints(0x80)), lanes.lane_ints(24))
    return builder.bitcast(builder.or_(builder.bitcast(value, lanes.V32), sign), lanes.VF32)


def spoil_totals(builder: Builder, totals: list[Any], rows: list[Any], count: Any) -> list[Any]:
    """Makes NaN of the totals of weight rows that hold a code which is no number: 0x7f or 0xff.

    Args:
        builder: of the code.
        totals: activation row by activation row, one for each weight row.
        rows: byte pointers to the codes of the weight rows.
        count: codes of a row.
    """
    none = ir.Constant(I8, 0)
    flags = [cgutils.alloca_once_value(builder, none) for _ in rows]
    largest = [cgutils.alloca_once_value(builder, every(V8, 0)) for _ in rows]
    for flag, cell in zip(flags, largest, strict=True):
        builder.store(none, flag)
        builder.store(every(V8, 0), cell)
    whole = builder.lshr(count, i64(5))
    with cgutils.for_range(builder, whole) as loop:
        at = times(builder, loop.index, BLOCK_BYTES)
        for row, cell in zip(rows, largest, strict=True):
            magnitude = builder.and_(vector_at(builder, lanes.offset(builder, row, at), V8), every(V8, _NO_NUMBER))
            known = builder.load(cell)
            builder.store(builder.select(builder.icmp_unsigned(">", magnitude, known), magnitude, known), cell)
    odd = builder.icmp_unsigned("!=", builder.and_(count, i64(BLOCK_BYTES - 1)), i64(0))
    for cell in largest:  # in most calls of common sizes nothing is looked at twice
        found = builder.icmp_unsigned("==", builder.load(cell), every(V8, _NO_NUMBER))
        odd = builder.or_(odd, builder.icmp_unsigned("!=", builder.bitcast(found, I32), ir.Constant(I32, 0)))
    with builder.if_then(odd, likely=False):
        for row, flag in zip(rows, flags, strict=True):
            with cgutils.for_range(builder, count) as loop:
                code = builder.load(builder.gep(row, [loop.index]))
                own = builder.icmp_unsigned("==", builder.or_(code, ir.Constant(I8, 0x80)), ir.Constant(I8, 0xFF))
                builder.store(builder.or_(builder.load(flag), builder.zext(own, I8)), flag)
    spoilt = [builder.icmp_unsigned("!=", builder.load(flag), none) for flag in flags]
    nan = ir.Constant(F32, float("nan"))
    return [builder.select(spoilt[place % len(rows)], nan, total) for place, total in enumerate(totals)]


def widen_exponents(builder: Builder, pointer: Any) -> Any:
    """Half of 2^(b - 127) for each of sixteen bytes b, exactly, since codes are counted twice; 255 is NaN."""
    raw = builder.zext(vector_at(builder, pointer, _B16), lanes.V32)
    bits = builder.shl(builder.sub(raw, lanes.lane_ints(1)), lanes.lane_ints(23))
    for exponent, exact in ((0, 0x00200000), (1, 0x00400000), (255, 0x7FC00000)):
        same = builder.icmp_unsigned("==", raw, lanes.lane_ints(exponent))
        bits = builder.select(same, lanes.lane_ints(exact), bits)
    return builder.bitcast(bits, lanes.VF32)


def widen_bf16_scales(builder: Builder, pointer: Any) -> Any:
    """Sixteen bf16 as float32."""
    raw = builder.zext(vector_at(builder, pointer, _V16), lanes.V32)
    return builder.bitcast(builder.shl(raw, lanes.lane_ints(16)), lanes.VF32)


class ScaleTable:
    """The scales of eight blocks of several weight rows, widened, on the stack; times those of activation rows.

    Args:
        builder: at a place that is reached once per call.
        scales: byte pointers to the scales of each weight row; a row has them in multiples of sixteen.
        widen: makes sixteen float32 of what lies at a byte pointer.
        scale_bytes: of one stored scale.
        rows: byte pointers to the float32 scales of activation rows, one per block, which can be read in eights; empty
            where activations have none.
        widened: is called with a column, sixteen scales of its weights and the number of their span.
    """

    def __init__(
        self,
        builder: Builder,
        scales: list[Any],
        widen: Callable[[Builder, Any], Any],
        scale_bytes: int,
        rows: list[Any] | None = None,
        widened: Callable[[int, Any, Any], None] | None = None,
    ) -> None:
        self._builder, self._scales, self._widen, self._bytes = builder, scales, widen, scale_bytes
        self._rows, self._widened = rows or [], widened
        table = cgutils.alloca_once(builder, ir.ArrayType(F32, len(scales) * max(1, len(self._rows)) * LANES))
        table.align = LINE
        self._table = builder.bitcast(table, I8.as_pointer())

    def load(self, span: Any) -> None:
        """Widens the sixteen scales of a span, an int64 value, of every weight row, and multiplies them."""
        builder = self._builder
        own = [self._doubled(row, span) for row in self._rows]
        for column, start in enumerate(self._scales):
            wide = self._widen(builder, lanes.offset(builder, start, times(builder, span, LANES * self._bytes)))
            if self._widened is not None:
                self._widened(column, wide, span)
            for number, factors in enumerate(own or [None]):
                value = wide if factors is None else builder.fmul(wide, factors)
                place = lanes.offset(builder, self._table, (number * len(self._scales) + column) * LANES * 4)
                builder.store(value, builder.bitcast(place, lanes.VF32.as_pointer()), align=4)

    def _doubled(self, row: Any, span: Any) -> Any:
        """The scales of eight blocks of an activation row, each twice: once for each group of weights."""
        eight = ir.VectorType(F32, SPAN)
        values = vector_at(self._builder, lanes.offset(self._builder, row, times(self._builder, span, SPAN * 4)), eight)
        twice = ir.Constant(ir.VectorType(I32, LANES), [lane // 2 for lane in range(LANES)])
        return self._builder.shuffle_vector(values, ir.Constant(eight, ir.Undefined), twice)

    def at(self, column: int, inside: Any, group: int = 0, row: int = 0) -> Any:
        """Byte pointer to a weight row's scale of group 0 or 1 of the span's block number `inside`."""
        builder, own = self._builder, i64(((row * len(self._scales) + column) * LANES + group) * 4)
        return lanes.offset(builder, self._table, builder.add(times(builder, inside, 8), own))

    def spans(self, cols: Any, body: Callable[[Any, Any], None]) -> None:
        """Calls `body(block, inside)` for each block of `cols` columns in rising order, its scales loaded."""
        builder = self._builder
        blocks = builder.lshr(builder.add(cols, i64(63)), i64(6))
        with cgutils.for_range(builder, builder.lshr(builder.add(blocks, i64(SPAN - 1)), i64(3))) as outer:
            self.load(outer.index)
            first = times(builder, outer.index, SPAN)
            left = builder.sub(blocks, first)
            count = builder.select(builder.icmp_unsigned("<", left, i64(SPAN)), left, ir.Constant(I64, SPAN))
            with cgutils.for_range(builder, count) as inner:
                body(builder.add(first, inner.index), inner.index)
