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
from compute_node.kernels.dots import Builder
from compute_node.kernels.integer_dots import call_named, every, i64, times, vector_at
from compute_node.kernels.lanes import F32, I8, I16, I64, LANES

__all__ = [
    "BLOCK_BYTES",
    "SPAN",
    "V8",
    "ScaleTable",
    "float8_values",
    "nibbles_at",
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
    """1/256 of the value of sixteen 8-bit floats (E4M3), as float32, exactly; NaN for the two codes that are none.

    Their bits, moved, are those of a half float of 1/256 of the value, also for the smallest ones.
    """
    magnitude = builder.and_(codes, every(_B16, 0x7F))
    nothing = builder.icmp_unsigned("==", magnitude, every(_B16, 0x7F))
    if lanes.has_feature("f16c") or lanes.has_feature("avx512f"):
        moved = builder.shl(builder.sext(codes, _V16), every(_V16, 7))
        half = builder.and_(moved, every(_V16, 0xBFFF))
        half = builder.or_(half, builder.sext(nothing, _V16))
        return builder.fpext(builder.bitcast(half, ir.VectorType(ir.HalfType(), LANES)), lanes.VF32)
    body = builder.shl(builder.zext(magnitude, lanes.V32), lanes.lane_ints(20))
    value = builder.fmul(builder.bitcast(body, lanes.VF32), ir.Constant(lanes.VF32, [2.0**112] * LANES))
    bits = builder.select(nothing, lanes.lane_ints(0x7FC00000), builder.bitcast(value, lanes.V32))
    sign = builder.shl(builder.zext(builder.and_(codes, every(_B16, 0x80)), lanes.V32), lanes.lane_ints(24))
    return builder.bitcast(builder.or_(bits, sign), lanes.VF32)


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
    """The scales of eight blocks of several weight rows, widened, on the stack.

    Args:
        builder: at a place that is reached once per call.
        scales: byte pointers to the scales of each weight row; a row has them in multiples of sixteen.
        widen: makes sixteen float32 of what lies at a byte pointer.
        scale_bytes: of one stored scale.
    """

    def __init__(
        self, builder: Builder, scales: list[Any], widen: Callable[[Builder, Any], Any], scale_bytes: int
    ) -> None:
        self._builder, self._scales, self._widen, self._bytes = builder, scales, widen, scale_bytes
        table = cgutils.alloca_once(builder, ir.ArrayType(F32, len(scales) * LANES))
        self._table = builder.bitcast(table, I8.as_pointer())

    def load(self, span: Any) -> None:
        """Widens the sixteen scales of a span, an int64 value, of every row."""
        builder = self._builder
        for row, start in enumerate(self._scales):
            wide = self._widen(builder, lanes.offset(builder, start, times(builder, span, LANES * self._bytes)))
            place = lanes.offset(builder, self._table, row * LANES * 4)
            builder.store(wide, builder.bitcast(place, lanes.VF32.as_pointer()), align=4)

    def at(self, row: int, inside: Any, group: int = 0) -> Any:
        """Byte pointer to a row's scale of group 0 or 1 of the span's block number `inside`."""
        builder = self._builder
        return lanes.offset(
            builder, self._table, builder.add(times(builder, inside, 8), i64(row * LANES * 4 + group * 4))
        )

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
