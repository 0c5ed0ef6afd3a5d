"""Which worker computes which expert: by weight, the same on every node, and little moves when a worker goes."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.client.rendezvous import rank_workers
from tierd.errors import UsageError

WORKERS = [("10.0.0.1:9471", 1.0), ("10.0.0.2:9471", 3.0), ("@a-0", 2.0)]
EXPERTS = 76 * 256


def names(workers, experts=EXPERTS):
    """Every expert's workers by name, the first choice first."""
    return np.array([name for name, _ in workers])[rank_workers(workers, experts)]


def test_each_worker_has_the_share_of_its_weight():
    first = names(WORKERS)[:, 0]
    total = sum(weight for _, weight in WORKERS)
    for name, weight in WORKERS:
        assert np.mean(first == name) == pytest.approx(weight / total, abs=0.02)


def test_every_node_ranks_alike_whatever_the_order_of_its_options():
    assert (names(WORKERS) == names(WORKERS[::-1])).all()
    assert (names(WORKERS, 100) == names(WORKERS)[:100]).all()


def test_only_the_experts_of_a_worker_that_goes_move_and_to_all_others():
    before, after = names(WORKERS), names(WORKERS[:1] + WORKERS[2:])
    gone = WORKERS[1][0]
    stayed = before[:, 0] != gone
    assert (before[stayed, 0] == after[stayed, 0]).all()
    # To whom they go was decided before: their second choice.
    assert (before[~stayed, 1] == after[~stayed, 0]).all()
    assert set(after[~stayed, 0]) == {WORKERS[0][0], WORKERS[2][0]}


@pytest.mark.parametrize("workers", [[], [("a:1", 1.0), ("a:1", 2.0)], [("a:1", 0.0)], [("a:1", float("nan"))]])
def test_what_cannot_be_ranked_is_refused(workers):
    with pytest.raises(UsageError, match="--worker"):
        rank_workers(workers, 4)
