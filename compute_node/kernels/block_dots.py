"""Dot products of weights in `fp8-e4m3`, `mxfp4` and `int4-g32` with float32 activations.

A weight becomes a float32, code times scale rounded once, and the sum has the one order of `dots`: the same bits as
the same weights stored as f32, apart from a scale of `fp8-e4m3` from 2^120 on, which overflows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils

from compute_node.kernels import lanes
from compute_node.kernels.block_codes import (
    BLOCK_BYTES,
    V8,
    ScaleTable,
    float8_values,
    nibbles_at,
    spoil_totals,
    twice_float4,
    widen_bf16_scales,
    widen_exponents,
)
from compute_node.kernels.dots import (
    LINE,
    Builder,
    LaneSums,
    padded_copy,
    prefetch_lines,
)
from compute_node.kernels.integer_dots import every, factor_at, i64, times
from compute_node.kernels.lanes import F32, I8, I32, LANES

__all__ = ["block_float4", "block_float8", "block_int4"]

_GROUP: Final = 32
_BLOCK: Final = 64

Decode = Callable[[Builder, Any], Any]
"""Makes 32 signed bytes of 32 nibbles."""


def _part(builder: Builder, codes: Any, first: int) -> Any:
    """Sixteen of 32 signed bytes as float32."""
    mask = ir.Constant(ir.VectorType(I32, LANES), list(range(first, first + LANES)))
    part = builder.shuffle_vector(codes, ir.Constant(V8, ir.Undefined), mask)
    return builder.sitofp(builder.sext(part, lanes.V32), lanes.VF32)


class _PaddedRows:
    """Activation rows in blocks of 64 columns; the last, if it is short, from a copy that zeros follow."""

    def __init__(self, builder: Builder, rows: list[Any], cols: Any) -> None:
        self._builder, self._rows = builder, rows
        self._whole = builder.lshr(cols, i64(6))
        kind = ir.ArrayType(F32, _BLOCK)
        cells = [cgutils.alloca_once(builder, kind) for _ in rows]
        self._last = [builder.bitcast(cell, I8.as_pointer()) for cell in cells]
        tail = builder.and_(cols, i64(_BLOCK - 1))
        with builder.if_then(builder.icmp_unsigned("!=", tail, i64(0)), likely=False):
            for row, cell in zip(rows, cells, strict=True):
                builder.store(ir.Constant(kind, None), cell)
                source = builder.bitcast(self._at(row, self._whole), F32.as_pointer())
                target = builder.bitcast(cell, F32.as_pointer())
                with cgutils.for_range(builder, tail) as loop:
                    value = builder.load(builder.gep(source, [loop.index]), align=1)
                    builder.store(value, builder.gep(target, [loop.index]))

    def _at(self, row: Any, block: Any) -> Any:
        return lanes.offset(self._builder, row, times(self._builder, block, _BLOCK * 4))

    def block(self, number: Any) -> list[Any]:
        """Byte pointers to 64 columns of each row."""
        builder = self._builder
        short = builder.icmp_unsigned(">=", number, self._whole)
        return [
            builder.select(short, last, self._at(row, number)) for row, last in zip(self._rows, self._last, strict=True)
        ]


def _nibble_dots(
    builder: Builder, decode: Decode, table: ScaleTable, w: list[Any], x: list[Any], cols: Any, after: Any
) -> list[Any]:
    """Dot products where a weight is a nibble times the scale of 32 columns."""
    sums, rows = LaneSums(builder, len(x), len(w)), _PaddedRows(builder, x, cols)

    def block(number: Any, inside: Any) -> None:
        prefetch_lines(builder, after, number, -(-len(w) * BLOCK_BYTES // LINE))
        inputs, at = rows.block(number), times(builder, number, BLOCK_BYTES)
        codes = [[decode(builder, g) for g in nibbles_at(builder, lanes.offset(builder, p, at))] for p in w]
        for group in range(2):
            factors = [factor_at(builder, table.at(column, inside, group)) for column in range(len(w))]
            for first in range(0, _GROUP, LANES):
                place = (group * _GROUP + first) * 4
                values = [lanes.lanes_at(builder, lanes.offset(builder, p, place)) for p in inputs]
                for column, factor in enumerate(factors):
                    weight = builder.fmul(_part(builder, codes[column][group], first), factor)
                    for row, value in enumerate(values):
                        sums.add(row, column, weight, value)

    table.spans(cols, block)
    return sums.totals()


def block_float8(builder: Builder, w: list[Any], s: list[Any], x: list[Any], cols: Any, after: Any) -> list[Any]:
    """Dot products of `fp8-e4m3` weight rows, of which a float32 scales 128 columns."""
    sums = LaneSums(builder, len(x), len(w))

    def factors_of(block: Any) -> list[Any]:
        at = times(builder, block, 4)
        wide = [factor_at(builder, lanes.offset(builder, p, at)) for p in s]
        return [builder.fmul(factor, ir.Constant(lanes.VF32, [256.0] * LANES)) for factor in wide]

    def step(weights: list[Any], inputs: list[Any], factors: list[Any]) -> None:
        values = [lanes.lanes_at(builder, p) for p in inputs]
        for column, (pointer, factor) in enumerate(zip(weights, factors, strict=True)):
            weight = builder.fmul(float8_values(builder, lanes.lanes_at(builder, pointer, I8)), factor)
            for row, value in enumerate(values):
                sums.add(row, column, weight, value)

    def moved(places: list[Any], chunk: Any, size: int) -> list[Any]:
        return [lanes.offset(builder, p, times(builder, chunk, LANES * size)) for p in places]

    whole = builder.lshr(cols, i64(4))
    with cgutils.for_range(builder, builder.lshr(builder.add(whole, i64(7)), i64(3))) as outer:
        factors, first = factors_of(outer.index), times(builder, outer.index, 8)
        left = builder.sub(whole, first)
        count = builder.select(builder.icmp_unsigned("<", left, i64(8)), left, i64(8))
        with cgutils.for_range(builder, count) as inner:
            chunk = builder.add(first, inner.index)
            prefetch_lines(builder, after, chunk, -(-len(w) * LANES // LINE))
            step(moved(w, chunk, 1), moved(x, chunk, 4), factors)
    tail = builder.and_(cols, i64(LANES - 1))
    with builder.if_then(builder.icmp_unsigned("!=", tail, i64(0)), likely=False):
        step(
            [padded_copy(builder, p, tail, I8, LANES) for p in moved(w, whole, 1)],
            [padded_copy(builder, p, tail, F32, LANES) for p in moved(x, whole, 4)],
            factors_of(builder.lshr(whole, i64(3))),
        )
    return spoil_totals(builder, sums.totals(), w, cols)


def _signed_int4(builder: Builder, nibbles: Any) -> Any:
    return builder.sub(nibbles, every(V8, 8))


def _signed_float4(builder: Builder, nibbles: Any) -> Any:
    return twice_float4(builder, nibbles, 0)


def block_float4(builder: Builder, w: list[Any], s: list[Any], x: list[Any], cols: Any, after: Any) -> list[Any]:
    """Dot products of `mxfp4` weight rows, whose scales are bytes."""
    table = ScaleTable(builder, s, widen_exponents, 1)
    return _nibble_dots(builder, _signed_float4, table, w, x, cols, after)


def block_int4(builder: Builder, w: list[Any], s: list[Any], x: list[Any], cols: Any, after: Any) -> list[Any]:
    """Dot products of `int4-g32` weight rows, whose scales are bf16."""
    table = ScaleTable(builder, s, widen_bf16_scales, 2)
    return _nibble_dots(builder, _signed_int4, table, w, x, cols, after)
