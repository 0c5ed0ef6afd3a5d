"""exp for float64 arrays out of additions and multiplications alone, so that a draw never depends on a maths library.

numpy's own exp differs in the last bit between machines: it takes another vector routine on each kind of CPU.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["exp"]

_LOG2E: Final = 1.4426950408889634
# ln 2 in two parts; the first has zeros in its last 21 bits, so that multiples up to 2^20 of it are exact.
_LN2_HIGH: Final = 0.6931471803691238
_LN2_LOW: Final = 1.9082149292705877e-10
_TERMS: Final = 13
_LOWEST: Final = -700.0


def exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Exponential of each element; relative error below 2e-15, and 0 below -700.

    Args:
        x: float64, any shape, finite, at most 700.
    """
    small = x < _LOWEST
    x = np.where(small, 0.0, x)
    halves = np.rint(x * _LOG2E)
    rest = (x - halves * _LN2_HIGH) - halves * _LN2_LOW
    result = np.ones_like(rest)
    for term in range(_TERMS, 0, -1):
        result = 1.0 + result * rest / term
    scaled: NDArray[np.float64] = np.ldexp(result, halves.astype(np.int32))
    return np.where(small, 0.0, scaled)
