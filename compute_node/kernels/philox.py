"""A number between 0 and 1 that is a function of a key alone: the first one of numpy's Philox generator."""

# ruff: noqa: ARG001 - an intrinsic is typed by its arguments and uses them in the code it generates
from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from compute_node.kernels.exp64 import F64
from compute_node.kernels.lanes import I64

__all__ = ["keyed_uniform"]

# Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3": Philox4x64 of ten rounds.
_ROUNDS: Final = 10
_FACTORS: Final = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_STEPS: Final = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_I128: Final = ir.IntType(128)
_FIRST_COUNTER: Final = 1  # numpy counts before it generates


def _product(builder: ir.IRBuilder, factor: int, value: Any) -> tuple[Any, Any]:
    """High and low half of the product of two unsigned words."""
    whole = builder.mul(builder.zext(value, _I128), ir.Constant(_I128, factor))
    return builder.trunc(builder.lshr(whole, ir.Constant(_I128, 64)), I64), builder.trunc(whole, I64)


def _uniform(builder: ir.IRBuilder, keys: list[Any]) -> Any:
    counter = [ir.Constant(I64, value) for value in (_FIRST_COUNTER, 0, 0, 0)]
    for _ in range(_ROUNDS):
        (high_0, low_0), (high_1, low_1) = (
            _product(builder, factor, word) for factor, word in zip(_FACTORS, counter[::2], strict=True)
        )
        mixed = [
            builder.xor(builder.xor(high, word), key)
            for high, word, key in zip((high_1, high_0), counter[1::2], keys, strict=True)
        ]
        counter = [mixed[0], low_1, mixed[1], low_0]
        keys = [builder.add(key, ir.Constant(I64, step)) for key, step in zip(keys, _STEPS, strict=True)]
    fraction = builder.uitofp(builder.lshr(counter[0], ir.Constant(I64, 11)), F64)
    return builder.fmul(fraction, ir.Constant(F64, 2.0**-53))


@intrinsic
def keyed_uniform(_typing: Any, first: Any, second: Any) -> Any:
    """float64 in [0, 1), a multiple of 2^-53: `Generator(Philox(key=[first, second])).random()` of numpy.

    The two words of the key are int64, whose bits are taken as unsigned numbers.
    """
    return types.float64(types.int64, types.int64), lambda _c, b, _s, a: _uniform(b, list(a))
