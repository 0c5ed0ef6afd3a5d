"""A token drawn from one row of logits: temperature, top-k, top-p, min-p and the draw itself, in one call.

What it computes, in this order, all in float64 and each sum one by one:

1. `d = (largest logit - logit) / temperature`; tokens with d of 37 and more are left out: their weights would change no
   sum that begins with 1, so none could be drawn.
2. The tokens in order of rising d, among equals that of rising ids; the first k of them.
3. `exp(-d)` of each, and the running sums of these in that order.
4. The first sums up to the first that reaches top_p of the last; as many of these as there are weights of at least
   min_p among them.
5. The token of the first sum above `u` times the last one, `u` being a function of seed and position alone.

Most tokens need not be looked at for a top-k or min-p: the largest logits of blocks of 64 say which blocks matter.
"""

# ruff: noqa: ARG001 - an intrinsic is typed by its arguments and uses them in the code it generates
from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from compute_node.kernels.exp64 import F64, exp64
from compute_node.kernels.lanes import F32, I8, I32, LANES, f32_at, i32_at, i64_at, lanes_at, offset
from compute_node.kernels.op import address_of
from compute_node.kernels.ordering import COUNTS, ID_BITS, nth_distance, sort_items
from compute_node.kernels.philox import keyed_uniform
from tierd.errors import UsageError

__all__ = ["Draw"]

_BLOCK: Final = 64
_CUT: Final = math.nextafter(37.0, 0.0)
_ID: Final = (1 << ID_BITS) - 1
_LOWEST: Final = -0x7F800000
"""The number of minus infinity."""
_SIGN: Final = 0x80000000

# Places of a call's arguments.
_LOGITS, _WIDTH, _TOP_K, _SEED, _POSITION, _NUMBERS, _BEST, _ITEMS, _SPARE, _WEIGHTS, _COUNTS, _ARGS = range(12)
_TEMPERATURE, _LIMIT, _TOP_P, _MIN_P = range(4)


@intrinsic
def _f64_at(_typing: Any, address: Any) -> Any:
    """The float64 values at an address, to be indexed."""
    return types.CPointer(types.float64)(types.int64), lambda _c, b, _s, a: b.inttoptr(a[0], F64.as_pointer())


@intrinsic
def _largest_of_block(_typing: Any, address: Any) -> Any:
    """The largest of 64 float32 at an address, none of which is NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, a: Any) -> Any:
        def larger(one: Any, other: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        at = builder.inttoptr(a[0], I8.as_pointer())
        parts = [lanes_at(builder, offset(builder, at, start * 4)) for start in range(0, _BLOCK, LANES)]
        largest = larger(larger(parts[0], parts[1]), larger(parts[2], parts[3]))
        width = LANES
        while width > 1:
            width //= 2
            mask = ir.VectorType(I32, width)
            halves = (list(range(width)), list(range(width, 2 * width)))
            low, high = (builder.shuffle_vector(largest, largest, ir.Constant(mask, half)) for half in halves)
            largest = larger(low, high)
        return builder.extract_element(largest, ir.Constant(I32, 0))

    return types.float32(types.int64), generate


@intrinsic
def _bits(_typing: Any, value: Any) -> Any:
    """The bits of a float32 as an int32."""
    return types.int32(types.float32), lambda _c, b, _s, a: b.bitcast(a[0], I32)


@intrinsic
def _value(_typing: Any, bits: Any) -> Any:
    """The float32 that has the lower 32 bits of an int64, as a float64."""

    def generate(_context: Any, builder: Any, _signature: Any, a: Any) -> Any:
        return builder.fpext(builder.bitcast(builder.trunc(a[0], I32), F32), F64)

    return types.float64(types.int64), generate


@njit(nogil=True, cache=True, error_model="numpy")
def _number(bits: int) -> Any:
    """Of a float32, given its bits as an int32: counted from both zeros, in the order of the values."""
    b = np.int64(bits)
    return b if b >= 0 else -_SIGN - b


@njit(nogil=True, cache=True, error_model="numpy")
def _float(number: int) -> Any:
    """The float32 of that number, as a float64."""
    return _value(number if number >= 0 else _SIGN - number)


@njit(nogil=True, cache=True, error_model="numpy")
def _farthest(top: int, temperature: float, limit: float) -> int:
    """The greatest distance from the float32 with number `top` at which d is still at most `limit`."""
    best = _float(top)
    inside, outside = 0, top - _LOWEST
    while outside - inside > 1:
        middle = (inside + outside) >> 1
        if (best - _float(top - middle)) / temperature <= limit:
            inside = middle
        else:
            outside = middle
    return inside


@njit(nogil=True, cache=True, error_model="numpy")
def _look(m: Any) -> Any:
    """Writes the largest logit of each block and returns the number of the largest of all."""
    logits, best, width = f32_at(m[_LOGITS]), f32_at(m[_BEST]), m[_WIDTH]
    whole = width // _BLOCK
    largest = np.float32(-np.inf)
    for block in range(whole):
        best[block] = _largest_of_block(m[_LOGITS] + block * _BLOCK * 4)
    if whole * _BLOCK < width:
        best[whole] = logits[whole * _BLOCK]
        for j in range(whole * _BLOCK + 1, width):
            best[whole] = max(best[whole], logits[j])
    for block in range((width + _BLOCK - 1) // _BLOCK):
        largest = max(largest, best[block])
    return _number(_bits(largest))


@njit(nogil=True, cache=True, error_model="numpy")
def _collect(m: Any, top: int, reach: int) -> int:
    """Makes items of the tokens whose distance from `top` is at most `reach`; returns how many they are."""
    logits, best, items, width = i32_at(m[_LOGITS]), i32_at(m[_BEST]), i64_at(m[_ITEMS]), m[_WIDTH]
    count = 0
    for block in range((width + _BLOCK - 1) // _BLOCK):
        if top - _number(best[block]) <= reach:
            for j in range(block * _BLOCK, min((block + 1) * _BLOCK, width)):
                distance = top - _number(logits[j])
                items[count] = distance << ID_BITS | j
                count += int(distance <= reach)
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def _reach(m: Any, top: int, limit: float) -> Any:
    """How far below the largest a token may lie; the distances of the blocks' best tell enough for a top-k."""
    temperature = _f64_at(m[_NUMBERS])[_TEMPERATURE]
    reach = _farthest(top, temperature, limit)
    blocks = (m[_WIDTH] + _BLOCK - 1) // _BLOCK
    if 0 < m[_TOP_K] <= blocks:
        best, items = i32_at(m[_BEST]), i64_at(m[_ITEMS])
        for block in range(blocks):
            items[block] = (top - _number(best[block])) << ID_BITS
        reach = min(reach, _equal(top, temperature, nth_distance(m[_ITEMS], blocks, m[_TOP_K] - 1, m[_COUNTS])))
    return reach


@njit(nogil=True, cache=True, error_model="numpy")
def _equal(top: int, temperature: float, distance: int) -> Any:
    """The greatest distance with the same d: where d rounds, several logits may have the same."""
    return _farthest(top, temperature, (_float(top) - _float(top - distance)) / temperature)


@njit(nogil=True, cache=True, error_model="numpy")
def _keep_nearest(m: Any, top: int, count: int) -> int:
    """Of `count` items keeps the k nearest and those with the same d as the last of these."""
    if not 0 < m[_TOP_K] < count:
        return count
    items = i64_at(m[_ITEMS])
    temperature = _f64_at(m[_NUMBERS])[_TEMPERATURE]
    reach = _equal(top, temperature, nth_distance(m[_ITEMS], count, m[_TOP_K] - 1, m[_COUNTS]))
    kept = 0
    for i in range(count):
        items[kept] = items[i]
        kept += int(items[i] >> ID_BITS <= reach)
    return kept


@njit(nogil=True, cache=True, error_model="numpy")
def _order_equals(m: Any, count: int) -> None:
    """Puts tokens of the same d in the order of their ids, and leaves nothing but these in the items."""
    items, d = i64_at(m[_ITEMS]), _f64_at(m[_WEIGHTS])
    for i in range(count):
        items[i] &= _ID
    first = 0
    for i in range(1, count + 1):
        if i < count and d[i] == d[first]:
            continue
        rising = True
        for j in range(first + 1, i):
            rising = rising and items[j - 1] < items[j]
        if not rising:
            sort_items(m[_ITEMS] + first * 8, m[_SPARE], i - first, 0, m[_COUNTS])
        first = i


@njit(nogil=True, cache=True, error_model="numpy")
def _weigh(m: Any, top: int, count: int) -> None:
    """Makes the items ids in their final order, and computes their weights."""
    items, weights = i64_at(m[_ITEMS]), _f64_at(m[_WEIGHTS])
    best, temperature = _float(top), _f64_at(m[_NUMBERS])[_TEMPERATURE]
    for i in range(count):
        weights[i] = (best - _float(top - (items[i] >> ID_BITS))) / temperature
    _order_equals(m, count)
    for i in range(count):
        weights[i] = exp64(-weights[i])


@njit(nogil=True, cache=True, error_model="numpy")
def _first(sums: Any, count: int, value: float, above: bool) -> int:
    """The first of rising sums that is at least `value`, or above it; `count` if none is."""
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        if sums[middle] < value or (above and sums[middle] == value):
            low = middle + 1
        else:
            high = middle
    return low


@cfunc("int64(int64)", cache=True, error_model="numpy")
def _draw_kernel(args: int) -> Any:
    """The token that is drawn."""
    m = i64_at(args)
    numbers = _f64_at(m[_NUMBERS])
    top = _look(m)
    count = _keep_nearest(m, top, _collect(m, top, _reach(m, top, numbers[_LIMIT])))
    sort_items(m[_ITEMS], m[_SPARE], count, ID_BITS, m[_COUNTS])
    _weigh(m, top, count)
    if m[_TOP_K] > 0:
        count = min(count, m[_TOP_K])
    weights, sums = _f64_at(m[_WEIGHTS]), _f64_at(m[_SPARE])
    total = 0.0
    for i in range(count):
        total += weights[i]
        sums[i] = total
    if numbers[_TOP_P] < 1:
        count = min(count, _first(sums, count, numbers[_TOP_P] * total, False) + 1)
    if numbers[_MIN_P] > 0:
        likely = 0
        for i in range(count):
            likely += int(weights[i] >= numbers[_MIN_P])
        count = max(likely, 1)
    target = keyed_uniform(m[_SEED], m[_POSITION]) * sums[count - 1]
    return i64_at(m[_ITEMS])[min(_first(sums, count, target, True), count - 1)]


class Draw:
    """Draws from rows of one width, on one thread at a time.

    Args:
        width: the vocabulary.

    Raises:
        UsageError: it is not 1 to 2^30.
    """

    __slots__ = ("_args", "_keep", "_numbers", "width")

    def __init__(self, width: int) -> None:
        if not 1 <= width <= 1 << ID_BITS:
            raise UsageError(f"no token can be drawn from {width}")
        self.width = width
        self._args = np.zeros(_ARGS, np.int64)
        self._numbers = np.zeros(4)
        self._keep = (
            self._numbers, np.zeros(-(-width // _BLOCK), np.float32), np.zeros(width + 1, np.int64),
            np.zeros(width, np.int64), np.zeros(width), np.zeros(COUNTS, np.int64),
        )  # fmt: skip
        self._args[_WIDTH] = width
        self._args[_NUMBERS:] = [address_of(array) for array in self._keep]

    def __call__(
        self,
        logits: NDArray[np.float32],
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        position: int,
    ) -> int:
        """The token.

        Args:
            logits: float32 [width], none NaN or infinite, but for minus infinity; one at least is more than that.
            temperature: above 0.
            top_k: 0: all.
            top_p: above 0, at most 1.
            min_p: 0 to 1.
            seed: 0 to 2^64 - 1.
            position: 0 to 2^64 - 1.

        Raises:
            UsageError: the logits have another shape, type or layout.
        """
        if logits.dtype != np.float32 or logits.shape != (self.width,) or not logits.flags.c_contiguous:
            raise UsageError(
                f"draw: logits must be float32 [{self.width}] in one piece, not {logits.dtype} {list(logits.shape)}"
            )
        # A top-p is a share of the sum of all; else those can be left out whose weight is surely below min_p.
        limit = min(_CUT, 1e-6 - math.log(min_p)) if min_p > 0 and top_p == 1 else _CUT
        self._numbers[:] = temperature, limit, top_p, min_p
        self._args[_LOGITS] = address_of(logits)
        self._args[_TOP_K] = top_k
        self._args[_SEED : _POSITION + 1] = _signed(seed), _signed(position)
        return int(_draw_kernel.ctypes(address_of(self._args)))


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - (1 << 64) if word >> 63 else word
