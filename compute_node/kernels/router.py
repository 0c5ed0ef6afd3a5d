"""The router: softmax over all experts, the k largest, and the choice of a token from logits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import cfunc, njit
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.lanes import exp32, f32_at, i32_at, i64_at, larger32
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from tierd.errors import UsageError

__all__ = ["argmax", "router"]

_LOWEST: Final = np.float32(-np.inf)


@njit(nogil=True, cache=True, error_model="numpy")
def _softmax(logits: Any, p: Any, count: int) -> None:
    """`p = softmax(logits)`; the sum runs in rising id."""
    largest = _LOWEST
    for e in range(count):
        largest = larger32(largest, logits[e])
    total = np.float32(0)
    for e in range(count):
        p[e] = exp32(logits[e] - largest)
        total = total + p[e]
    for e in range(count):
        p[e] = p[e] / total


@cfunc(KERNEL, cache=True, error_model="numpy")
def _router_kernel(args: int, lo: int, hi: int) -> None:
    """Record: logits, stride, indices, stride, weights, stride, experts, k, renormalise, scratch, scratch stride."""
    m = i64_at(args)
    experts, chosen = m[6], m[7]
    for row in range(lo, hi):
        indices, weights = i32_at(m[2] + row * m[3]), f32_at(m[4] + row * m[5])
        p = f32_at(m[9] + row * m[10])
        _softmax(f32_at(m[0] + row * m[1]), p, experts)
        kept = np.float32(0)
        for k in range(chosen):
            best = -1
            for e in range(experts):
                # Not comparable values (NaN) are never larger, so the lowest free id stands: always a valid one.
                taken = False
                for earlier in range(k):
                    taken = taken or indices[earlier] == e
                if not taken and (best < 0 or p[e] > p[best]):
                    best = e
            indices[k] = best
            weights[k] = p[best]
            kept = kept + p[best]
        if m[8] != 0:
            for k in range(chosen):
                weights[k] = weights[k] / kept


@cfunc(KERNEL, cache=True, error_model="numpy")
def _argmax_kernel(args: int, lo: int, hi: int) -> None:
    """Record: logits, stride, ids, width."""
    m = i64_at(args)
    for row in range(lo, hi):
        logits = f32_at(m[0] + row * m[1])
        best, largest = 0, _LOWEST
        for j in range(m[3]):
            if logits[j] > largest:
                best, largest = j, logits[j]
        i64_at(m[2])[row] = best


def router(
    name: str,
    logits: NDArray[np.float32],
    indices: NDArray[np.int32],
    weights: NDArray[np.float32],
    batch: Batch,
    *,
    renormalise: bool,
) -> Op:
    """Chooses k experts for each live row: softmax over all experts in float32, then the k largest.

    Sums run in rising expert id (softmax) and in router order (renormalising). Equal values go to the lower id.
    Softmax after the choice, as Mixtral is often written, is the same function as `renormalise=True`.

    Args:
        name: of the op.
        logits: float32 [max_rows, experts].
        indices: int32 [max_rows, k]; receives expert ids, largest weight first, always distinct and valid.
        weights: float32 [max_rows, k]; receives their weights.
        batch: the live rows.
        renormalise: divide the weights by their sum (`norm_topk_prob`).
    """
    check_buffer(name, "logits", logits, (batch.max_rows, None))
    check_buffer(name, "indices", indices, (batch.max_rows, None), np.int32, writable=True)
    experts, k = logits.shape[1], indices.shape[1]
    check_buffer(name, "weights", weights, (batch.max_rows, k), writable=True)
    if not 1 <= k <= experts:
        raise UsageError(f"{name}: {k} experts of {experts} cannot be chosen")
    scratch = np.zeros((batch.max_rows, experts), np.float32)
    args = record([
        address_of(logits), logits.strides[0], address_of(indices), indices.strides[0],
        address_of(weights), weights.strides[0], experts, k, int(renormalise), address_of(scratch), scratch.strides[0],
    ])  # fmt: skip
    return Op(
        name, "router", _router_kernel.address, args, batch.count,
        units=1, per_row=True, grain=1, work=experts * (8 + 2 * k), keep=(logits, indices, weights, scratch, batch),
    )  # fmt: skip


def argmax(name: str, logits: NDArray[np.float32], ids: NDArray[np.int64], batch: Batch) -> Op:
    """`ids[r]` = index of the largest logit of each live row, the lower one if equal; 0 if none can be compared.

    Args:
        name: of the op.
        logits: float32 [max_rows, vocabulary].
        ids: int64 [max_rows].
        batch: the live rows.
    """
    check_buffer(name, "logits", logits, (batch.max_rows, None))
    check_buffer(name, "ids", ids, (batch.max_rows,), np.int64, writable=True)
    args = record([address_of(logits), logits.strides[0], address_of(ids), logits.shape[1]])
    return Op(
        name, "argmax", _argmax_kernel.address, args, batch.count,
        units=1, per_row=True, grain=1, work=logits.shape[1], keep=(logits, ids, batch),
    )  # fmt: skip
