"""The router: scores of all experts and the choice of the k largest; the choice of a token from logits.

Scores are a softmax (Shazeer et al. 2017, arXiv:1701.06538) or sigmoids with a correction that counts for the choice
alone and, in some families, a choice of groups before that of experts (DeepSeek-V3 report, arXiv:2412.19437).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numba import cfunc, njit
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.lanes import exp32, f32_at, i32_at, i64_at, larger32
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from tierd.errors import UsageError

__all__ = ["RoutingRule", "router"]

_LOWEST: Final = np.float32(-np.inf)

# Fields of the router's record.
LOGITS, LOGITS_STRIDE, INDICES, INDICES_STRIDE, WEIGHTS, WEIGHTS_STRIDE, EXPERTS, CHOSEN, SIGMOID = range(9)
RENORMALISE, GROUPS, KEPT_GROUPS, CORRECTION, FACTORS, SCRATCH, SCRATCH_STRIDE = range(9, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How experts are chosen and weighted.

    Attributes:
        score: `softmax` over all experts, or `sigmoid` of each.
        renormalise: divide the weights of the chosen by their sum (`norm_topk_prob`).
        eps: added to that sum.
        scaling: the weights are multiplied by it at last (`routed_scaling_factor`).
        groups: equal parts of the experts in rising id (`n_group`).
        kept_groups: the experts are chosen from as many groups (`topk_group`): those with the largest sums of their two
            best scores.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool
    eps: float = 0.0
    scaling: float = 1.0
    groups: int = 1
    kept_groups: int = 1


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


@njit(nogil=True, cache=True, error_model="numpy")
def _best_two(scores: Any, first: int, end: int) -> Any:
    """Sum of the two largest of scores first..end."""
    one, two = _LOWEST, _LOWEST
    for e in range(first, end):
        if scores[e] > one:
            one, two = scores[e], one
        elif scores[e] > two:
            two = scores[e]
    return one + two


@njit(nogil=True, cache=True, error_model="numpy")
def _keep_groups(scores: Any, sums: Any, experts: int, groups: int, kept: int) -> None:
    """Makes the scores outside the best groups -inf; of equal groups the lower one is better."""
    size = experts // groups
    for g in range(groups):
        sums[g] = _best_two(scores, g * size, (g + 1) * size)
    for g in range(groups):
        better = 0
        for other in range(groups):
            if sums[other] > sums[g] or (not sums[g] > sums[other] and other < g):
                better += 1
        if better >= kept:
            for e in range(g * size, (g + 1) * size):
                scores[e] = _LOWEST


@njit(nogil=True, cache=True, error_model="numpy")
def _scores(m: Any, row: int, p: Any, by: Any) -> None:
    """`p` = score of each expert, `by` = what the choice goes by."""
    experts, correction, logits = m[EXPERTS], m[CORRECTION], f32_at(m[LOGITS] + row * m[LOGITS_STRIDE])
    if m[SIGMOID] != 0:
        for e in range(experts):
            p[e] = np.float32(1) / (np.float32(1) + exp32(-logits[e]))
    else:
        _softmax(logits, p, experts)
    for e in range(experts):
        by[e] = p[e] + f32_at(correction)[e] if correction != 0 else p[e]


@njit(nogil=True, cache=True, error_model="numpy")
def _largest(by: Any, experts: int, indices: Any, found: int) -> Any:
    """The expert with the largest of `by` that is not among the first `found` of `indices`, the lowest if equal."""
    best = -1
    for e in range(experts):
        # Not comparable values (NaN) are never larger, so the lowest free id stands: always a valid one.
        taken = False
        for earlier in range(found):
            taken = taken or indices[earlier] == e
        if not taken and (best < 0 or by[e] > by[best]):
            best = e
    return best


@cfunc(KERNEL, cache=True, error_model="numpy")
def _router_kernel(args: int, lo: int, hi: int) -> None:
    """One unit is one row. Scratch of a row: scores of all experts, what the choice goes by, sums of groups."""
    m = i64_at(args)
    experts, chosen, factors = m[EXPERTS], m[CHOSEN], f32_at(m[FACTORS])
    for row in range(lo, hi):
        indices, weights = i32_at(m[INDICES] + row * m[INDICES_STRIDE]), f32_at(m[WEIGHTS] + row * m[WEIGHTS_STRIDE])
        scratch = m[SCRATCH] + row * m[SCRATCH_STRIDE]
        p, by = f32_at(scratch), f32_at(scratch + experts * 4)
        _scores(m, row, p, by)
        if m[GROUPS] > m[KEPT_GROUPS]:
            _keep_groups(by, f32_at(scratch + experts * 8), experts, m[GROUPS], m[KEPT_GROUPS])
        total = np.float32(0)
        for k in range(chosen):
            best = _largest(by, experts, indices, k)
            indices[k] = best
            weights[k] = p[best]
            total = total + p[best]
        total = total + factors[0] if m[RENORMALISE] != 0 else np.float32(1)
        for k in range(chosen):
            weights[k] = weights[k] / total * factors[1]


def router(
    name: str,
    logits: NDArray[np.float32],
    indices: NDArray[np.int32],
    weights: NDArray[np.float32],
    batch: Batch,
    *,
    rule: RoutingRule,
    correction: NDArray[np.float32] | None = None,
) -> Op:
    """Chooses k experts for each live row: scores of all experts in float32, then the k largest.

    Sums run in rising expert id (softmax) and in router order (renormalising). Equal scores go to the lower id, equal
    groups to the lower group. Softmax after the choice, as Mixtral is often written, is the same function as a
    renormalised softmax.

    Args:
        name: of the op.
        logits: float32 [max_rows, experts].
        indices: int32 [max_rows, k]; receives expert ids, largest score first, always distinct and valid.
        weights: float32 [max_rows, k]; receives their weights.
        batch: the live rows.
        rule: how.
        correction: float32 [experts], added to the scores for the choice, not for the weights; None: nothing is.
    """
    check_buffer(name, "logits", logits, (batch.max_rows, None))
    check_buffer(name, "indices", indices, (batch.max_rows, None), np.int32, writable=True)
    experts, k = logits.shape[1], indices.shape[1]
    check_buffer(name, "weights", weights, (batch.max_rows, k), writable=True)
    if correction is not None:
        check_buffer(name, "correction", correction, (experts,))
    if not 1 <= k <= experts:
        raise UsageError(f"{name}: {k} experts of {experts} cannot be chosen")
    groups, kept = rule.groups, rule.kept_groups
    if not 1 <= kept <= groups or experts % groups or (kept < groups and experts // groups < 2):
        raise UsageError(f"{name}: {experts} experts cannot be chosen from {kept} of {groups} groups")
    if k > experts // groups * kept:
        raise UsageError(f"{name}: {kept} groups of {experts // groups} experts do not hold {k}")
    scratch = np.zeros((batch.max_rows, 2 * experts + groups), np.float32)
    factors = np.array([rule.eps, rule.scaling], np.float32)
    args = record([
        address_of(logits), logits.strides[0], address_of(indices), indices.strides[0],
        address_of(weights), weights.strides[0], experts, k, int(rule.score == "sigmoid"),
        int(rule.renormalise), groups, kept, address_of(correction), address_of(factors),
        address_of(scratch), scratch.strides[0],
    ])  # fmt: skip
    return Op(
        name, "router", _router_kernel.address, args, batch.count,
        units=1, per_row=True, grain=1, work=32 * experts * (8 + 2 * k),
        keep=(logits, indices, weights, correction, factors, scratch, batch),
    )  # fmt: skip
