"""Dot products of weights in `mxfp4` and `int4-g32` with quantised activations: the `fast` numerics.

Activations come in groups of 64 columns with one scale (`quantised_rows`), weights in groups of 32. Lane j of sixteen
sums the integer products of columns 4j ... 4j + 3 of 64: exact, since codes of `mxfp4` are counted twice, as whole
numbers. Lanes 0 to 7 have the scale of the first 32 columns, the others that of the next; times the activations' it
is rounded once, and the products are added by one fma per lane, block after block, as in `integer_dots`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba.extending import intrinsic

from compute_node.kernels import lanes
from compute_node.kernels.block_codes import (
    BLOCK_BYTES,
    ScaleTable,
    nibbles_at,
    twice_float4,
    widen_bf16_scales,
    widen_exponents,
)
from compute_node.kernels.dots import LINE, Builder, pointers, prefetch_lines, signature_of
from compute_node.kernels.integer_dots import (
    QuantisedGroups,
    add_products,
    dot_quarters,
    times,
    totals_of,
    vector_at,
    zero_sums,
)
from compute_node.kernels.lanes import F32, I8, I32, LANES

__all__ = ["dots_fast_float4", "dots_fast_int4_small"]

_PAIR: Final = ir.VectorType(F32, 2)
_FLOAT4_BIAS: Final = 16
_INT4_BIAS: Final = 8


def _pair(builder: Builder, pointer: Any) -> Any:
    """Two float32 at a byte pointer, the first in lanes 0 to 7, the second in the others."""
    both = vector_at(builder, pointer, _PAIR)
    mask = ir.Constant(ir.VectorType(I32, LANES), [0] * 8 + [1] * 8)
    return builder.shuffle_vector(both, ir.Constant(_PAIR, ir.Undefined), mask)


def _joined(builder: Builder, low: Any, high: Any) -> Any:
    """Two vectors of 32 bytes as one of 64."""
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 64), list(range(64))))


def _dots(
    builder: Builder,
    decode: Callable[[Builder, Any], Any],
    bias: int,
    table: ScaleTable,
    w: list[Any],
    x: list[Any],
    cols: Any,
    after: Any,
) -> list[Any]:
    """Dot products where a weight is `decode(nibble) - bias` times the scale of 32 columns; decoded it is 0 to 127."""
    rows, sums = QuantisedGroups(builder, x, cols), zero_sums(builder, len(x) * len(w))

    def block(number: Any, inside: Any) -> None:
        prefetch_lines(builder, after, number, -(-len(w) * BLOCK_BYTES // LINE))
        at = times(builder, number, BLOCK_BYTES)
        codes = [[decode(builder, g) for g in nibbles_at(builder, lanes.offset(builder, p, at))] for p in w]
        weights = [_joined(builder, *halves) for halves in codes]
        for row in range(len(x)):
            values, eighths = rows.group(row, number)  # eighths are -8 times sums of four
            offset = builder.shl(eighths, lanes.lane_ints((bias // 8).bit_length() - 1))
            for column, weight in enumerate(weights):
                integers = dot_quarters(builder, offset, weight, values, weights_signed=False, bias=bias)
                factor = _pair(builder, table.at(column, inside, row=row))
                add_products(builder, sums[row * len(w) + column], integers, factor)

    table.spans(cols, block)
    return totals_of(builder, sums)


def _biased_float4(builder: Builder, nibbles: Any) -> Any:
    return twice_float4(builder, nibbles, _FLOAT4_BIAS)


@intrinsic
def dots_fast_float4(_typing: Any, w: Any, s: Any, x: Any, cols: Any, after: Any) -> Any:
    """Dot products of `mxfp4` weight rows at addresses `w`, scales at `s`, with quantised rows at addresses `x`.

    `after` is where the weights of the next call begin; their lines are asked for on the way.
    """

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
        data, scales, inputs = (pointers(builder, a) for a in arguments[:3])
        table, ahead = (
            ScaleTable(builder, scales, widen_exponents, 1, inputs),
            builder.inttoptr(arguments[4], I8.as_pointer()),
        )
        totals = _dots(builder, _biased_float4, _FLOAT4_BIAS, table, data, inputs, arguments[3], ahead)
        return context.make_tuple(builder, signature.return_type, totals)

    return signature_of(w, s, x, cols, after), generate


@intrinsic
def dots_fast_int4_small(_typing: Any, w: Any, s: Any, x: Any, cols: Any, after: Any) -> Any:
    """The same for `int4-g32` weights, whose scales are bf16."""

    def generate(context: Any, builder: Builder, signature: Any, arguments: Any) -> Any:
        data, scales, inputs = (pointers(builder, a) for a in arguments[:3])
        table = ScaleTable(builder, scales, widen_bf16_scales, 2, inputs)
        ahead = builder.inttoptr(arguments[4], I8.as_pointer())
        totals = _dots(builder, lambda _, nibbles: nibbles, _INT4_BIAS, table, data, inputs, arguments[3], ahead)
        return context.make_tuple(builder, signature.return_type, totals)

    return signature_of(w, s, x, cols, after), generate
