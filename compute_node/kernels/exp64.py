"""exp of a float64 out of additions and multiplications alone: a draw never depends on a maths library.

numpy's own exp differs in the last bit between machines: it takes another vector routine on each kind of CPU.
"""

# ruff: noqa: ARG001 - an intrinsic is typed by its arguments and uses them in the code it generates
from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from compute_node.kernels.lanes import I64, has_feature

__all__ = ["F64", "exp64"]

F64: Final = ir.DoubleType()
_LOG2E: Final = 1.4426950408889634
# ln 2 in two parts; the first has zeros in its last 21 bits, so that multiples up to 2^20 of it are exact.
_LN2_HIGH: Final = 0.6931471803691238
_LN2_LOW: Final = 1.9082149292705877e-10
_ROUND: Final = 6755399441055744.0  # 1.5 * 2^52: adding it rounds to an integer, held in the low bits
_TERMS: Final = 13


def _number(value: float) -> ir.Constant:
    return ir.Constant(F64, value)


def _quotient(builder: ir.IRBuilder, x: Any, divisor: int) -> Any:
    """`x / divisor` rounded once, for a divisor up to 13.

    A division takes several times as long as what replaces it here: with the reciprocal `r`, `q = x * r` is at most
    1.5 units of its last place from the quotient, so `x - q * divisor` is exact (a small multiple of that unit), and
    `q + that * r` comes within 2^-52 units of the quotient, which itself is no nearer to the middle between two numbers
    than 1/26 of a unit: it rounds as the quotient does. By powers of two the first product is exact.
    """
    if not has_feature("fma"):
        return builder.fdiv(x, _number(float(divisor)))
    r = _number(1 / divisor)
    q = builder.fmul(x, r)
    if divisor & (divisor - 1) == 0:
        return q
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(F64, [F64] * 3), "llvm.fma.f64")
    rest = builder.call(fma, [q, _number(float(-divisor)), x])
    return builder.call(fma, [rest, r, q])


def _exp(builder: ir.IRBuilder, x: Any) -> Any:
    shifted = builder.fadd(builder.fmul(x, _number(_LOG2E)), _number(_ROUND))
    power = builder.fsub(shifted, _number(_ROUND))
    rest = builder.fsub(x, builder.fmul(power, _number(_LN2_HIGH)))
    rest = builder.fsub(rest, builder.fmul(power, _number(_LN2_LOW)))
    series = _number(1.0)
    for term in range(_TERMS, 0, -1):
        series = builder.fadd(_number(1.0), _quotient(builder, builder.fmul(series, rest), term))
    # Multiply by 2^power in the exponent bits. The range of x keeps the result a normal number.
    steps = builder.sub(builder.bitcast(shifted, I64), builder.bitcast(_number(_ROUND), I64))
    scaled = builder.add(builder.bitcast(series, I64), builder.shl(steps, ir.Constant(I64, 52)))
    return builder.bitcast(scaled, F64)


@intrinsic
def exp64(_typing: Any, x: Any) -> Any:
    """Exp of a float64 from -700 to 700; relative error below 2e-15.

    Cody-Waite reduction by ln 2 in two parts, then the Taylor series to the thirteenth power on |r| <= ln(2) / 2, each
    product, quotient and sum rounded by itself.
    """
    return types.float64(types.float64), lambda _c, b, _s, a: _exp(b, a[0])
