"""The likeliest token of each row of logits, found where they are computed: a greedy step brings back one number."""

# ruff: noqa: ARG001 - an intrinsic is typed by its arguments and uses them in the code it generates
from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import cfunc, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.lanes import I8, LANES, VF32, f32_at, fma, i64_at, lanes_at, offset, zero_lanes
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record

__all__ = ["likeliest"]

_LOWEST: Final = np.float32(-np.inf)
_BLOCK: Final = 1024
"""Logits whose largest is known before anyone asks where it is."""


@intrinsic
def _look(_typing: Any, values: Any, state: Any) -> Any:
    """Looks at sixteen more values. In `state` is, by lane, the largest; then 0, or NaN once one was not finite."""

    def generate(context: Any, builder: Any, _signature: Any, a: Any) -> Any:
        at, kept = (builder.inttoptr(address, I8.as_pointer()) for address in a)
        found, largest = lanes_at(builder, at), lanes_at(builder, kept)
        largest = builder.select(builder.fcmp_ordered(">", found, largest), found, largest)
        after = offset(builder, kept, 4 * LANES)
        finite = fma(builder, found, zero_lanes(), lanes_at(builder, after))
        for pointer, vector in ((kept, largest), (after, finite)):
            builder.store(vector, builder.bitcast(pointer, VF32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit(nogil=True, cache=True, error_model="numpy")
def _largest(at: int, scratch: int, width: int) -> Any:
    """The largest of `width` logits, which lie at an address."""
    logits, state, whole = f32_at(at), f32_at(scratch), width // LANES * LANES
    for lane in range(LANES):
        state[lane] = _LOWEST
    for j in range(0, whole, LANES):
        _look(at + j * 4, scratch)
    largest = _LOWEST
    for lane in range(LANES):
        largest = max(largest, state[lane])
    for j in range(whole, width):
        largest = max(largest, logits[j])
        state[LANES] += logits[j] * np.float32(0)
    return largest


@cfunc(KERNEL, cache=True, error_model="numpy")
def _likeliest_kernel(args: int, lo: int, hi: int) -> None:
    """Record: logits, stride, ids, width, scratch, stride. One unit is one row."""
    m = i64_at(args)
    width = m[3]
    for row in range(lo, hi):
        at, scratch = m[0] + row * m[1], m[4] + row * m[5]
        logits, state = f32_at(at), f32_at(scratch)
        best, place = _LOWEST, 0
        for lane in range(LANES):
            state[LANES + lane] = np.float32(0)
        for start in range(0, width, _BLOCK):
            largest = _largest(at + start * 4, scratch, min(_BLOCK, width - start))
            if largest > best:
                best, place = largest, start
        wrong = np.float32(0)
        for lane in range(LANES):
            wrong += state[LANES + lane]
        while place < width and logits[place] != best:
            place += 1
        i64_at(m[2])[row] = place if wrong == 0 else -1


def likeliest(name: str, logits: NDArray[np.float32], ids: NDArray[np.int64], batch: Batch) -> Op:
    """`ids[r]` = index of the largest logit of each live row, the lower one if equal; -1 if one is not finite.

    Args:
        name: of the op.
        logits: float32 [max_rows, vocabulary].
        ids: int64 [max_rows].
        batch: the live rows.
    """
    check_buffer(name, "logits", logits, (batch.max_rows, None))
    check_buffer(name, "ids", ids, (batch.max_rows,), np.int64, writable=True)
    scratch = np.zeros((batch.max_rows, 2 * LANES), np.float32)
    args = record([
        address_of(logits), logits.strides[0], address_of(ids), logits.shape[1],
        address_of(scratch), scratch.strides[0],
    ])  # fmt: skip
    return Op(
        name, "likeliest", _likeliest_kernel.address, args, batch.count,
        units=1, per_row=True, grain=1, work=logits.shape[1], keep=(logits, ids, scratch, batch),
    )  # fmt: skip
