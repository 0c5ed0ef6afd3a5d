"""Which worker computes which expert: weighted rendezvous hashing, the same on every node without a word said.

Thaler and Ravishankar, IEEE/ACM Transactions on Networking 6(1), 1998; weighted by -w / ln(h), Schindelhauer and
Schomaker, SPAA 2005. When a worker goes, only its own experts move, and they spread over all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError
from tierd.store.checksums import xxh3

__all__ = ["rank_workers"]


def rank_workers(workers: Sequence[tuple[str, float]], experts: int) -> NDArray[np.intp]:
    """Every expert's workers, the first choice first: intp [experts, workers].

    Args:
        workers: name and weight of each; an expert's first choice is a worker with the share of its weight.
        experts: how many, by flat number.

    Raises:
        UsageError: no worker, a name twice, or a weight that is not positive.
    """
    names = [name for name, _ in workers]
    if not workers or len(set(names)) != len(names):
        raise UsageError("--worker: name each worker once")
    if not all(0 < weight < 1e6 for _, weight in workers):
        raise UsageError("--worker: a weight is a number above 0, as in HOST:PORT=2")
    numbers = np.arange(experts, dtype=np.uint64)
    scores = np.empty((experts, len(workers)))
    for place, (name, weight) in enumerate(workers):
        hashed = _mix(_mix(numbers) ^ np.uint64(xxh3(name.encode())))
        # In the middle of 2^53 equal parts of (0, 1): never 0, never 1.
        uniform = ((hashed >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
        scores[:, place] = weight / -np.log(uniform)
    return np.argsort(-scores, axis=1, kind="stable")


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
