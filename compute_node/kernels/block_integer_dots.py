"""Dot products of weights in `mxfp4` and `int4-g32` with quantised activations: the `fast` numerics.

Activations come in groups of 64 columns with one scale (`quantised_rows`), weights in groups of 32. Lane j of eight
sums the integer products of columns 4j ... 4j + 3 of 32: exact, since codes of `mxfp4` are counted twice, as whole
numbers. The weights' scale times the activations' is rounded once, and the products are added by one fma per lane,
group after group. What codes stand for too much, having been made unsigned, is made good as in `integer_dots`, by the
offsets of 32 columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compute_node.kernels import lanes
from compute_node.kernels.block_codes import (
    BLOCK_BYTES,
    ScaleTable,
    nibbles_at,
    twice_float4,
    widen_bf16_scales,
    widen_exponents,
)
from compute_node.kernels.dots import LINE, Builder, Dots, prefetch_lines
from compute_node.kernels.integer_dots import (
    Fixes,
    QuantisedGroups,
    add_products,
    dot_halves,
    factor_at,
    times,
    totals_of,
    zero_sums,
)
from compute_node.kernels.lanes import LANES

__all__ = ["fast_float4", "fast_small_int4"]

_FLOAT4_BIAS: Final = 16
_INT4_BIAS: Final = 8
_SUMS: Final = 8


@dataclass(frozen=True, slots=True)
class _Format:
    """A weight is `decode(nibble) - bias` times the scale of 32 columns; decoded it is 0 to 31.

    Attributes:
        decode: makes bytes of nibbles.
        bias: 8 or 16.
        widen: makes sixteen float32 of scales.
        scale_bytes: of one stored scale.
    """

    decode: Callable[[Builder, Any], Any]
    bias: int
    widen: Callable[[Builder, Any], Any]
    scale_bytes: int


def _dots(
    kind: _Format, builder: Builder, w: list[Any], s: list[Any], x: list[Any], cols: Any, after: Any
) -> list[Any]:
    """Sums of all pairs, activation row by activation row."""
    rows, sums = QuantisedGroups(builder, x, cols), zero_sums(builder, len(x) * len(w))
    fixes = Fixes(builder, len(sums))

    def widened(column: int, scales: Any, span: Any) -> None:
        for row, start in enumerate(rows.half_offsets):
            offsets = lanes.lanes_at(builder, lanes.offset(builder, start, times(builder, span, LANES * 4)))
            if kind.bias == _FLOAT4_BIAS:
                offsets = builder.fadd(offsets, offsets)
            fixes.add(row * len(w) + column, scales, offsets)

    table = ScaleTable(builder, s, kind.widen, kind.scale_bytes, x, widened)

    def block(number: Any, inside: Any) -> None:
        prefetch_lines(builder, after, number, -(-len(w) * BLOCK_BYTES // LINE))
        at = times(builder, number, BLOCK_BYTES)
        for column, start in enumerate(w):
            codes = [kind.decode(builder, g) for g in nibbles_at(builder, lanes.offset(builder, start, at))]
            for row in range(len(x)):
                for group, (weights, values) in enumerate(zip(codes, rows.group(row, number), strict=True)):
                    integers = dot_halves(builder, [weights], [values], weights_signed=False)
                    factor = factor_at(builder, table.at(column, inside, group, row), _SUMS)
                    add_products(builder, sums[row * len(w) + column], integers, factor)

    table.spans(cols, block)
    fixes.apply(sums)
    return totals_of(builder, sums)


def _biased_float4(builder: Builder, nibbles: Any) -> Any:
    return twice_float4(builder, nibbles, _FLOAT4_BIAS)


_FLOAT4: Final = _Format(_biased_float4, _FLOAT4_BIAS, widen_exponents, 1)
_INT4: Final = _Format(lambda _, nibbles: nibbles, _INT4_BIAS, widen_bf16_scales, 2)

fast_float4: Final[Dots] = partial(_dots, _FLOAT4)
"""Dot products of `mxfp4` weight rows, whose scales are bytes, with quantised rows."""
fast_small_int4: Final[Dots] = partial(_dots, _INT4)
"""Dot products of `int4-g32` weight rows, whose scales are bf16, with quantised rows."""
