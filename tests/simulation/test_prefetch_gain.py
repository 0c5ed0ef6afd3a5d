"""What prefetch hides of the waiting, and what wrong hints cost, in numbers that do not depend on the machine."""

from __future__ import annotations

import numpy as np
import pytest
from simulation.prefetch_gain import Pace, Walk

from compute_node.bench.drawn_hints import MEASURED_PRECISION, DrawnHints
from tierd.policy.drawn_routes import RECORDED
from tierd.prefetch.throttle import Throttle

LAYERS, EXPERTS, TOP_K, TOKENS, SLOTS = 8, 64, 8, 24, 128


def compared(
    ratio: float, *, right: bool = True, throttle: Throttle | None = None, settling: int = 1
) -> tuple[float, float, float]:
    """Seconds per token without and with hints, and the seconds per token that could be hidden."""
    routes = RECORDED.generate(tokens=TOKENS, layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    pace = Pace()
    compute = LAYERS * (pace.dense + TOP_K * pace.expert) + pace.head
    # Of a token's experts some 0.6 are missing at this size, whatever the drive.
    walk = Walk(routes, EXPERTS, SLOTS, Pace(read=ratio * compute / (0.6 * LAYERS * TOP_K)))
    hints = DrawnHints(
        walk, range(LAYERS), EXPERTS, routes, MEASURED_PRECISION.stretched(2 * TOP_K), right=right,
        throttle=throttle or Throttle(2, fixed=True), lead_seconds=2 * (1 + ratio) * compute / LAYERS,
    )  # fmt: skip
    walk.run(None)
    for _ in range(settling):
        walk.run(hints)
    missed, waited = walk.missed, walk.waited
    off = walk.run(None)
    reads = (walk.missed - missed) / TOKENS * ratio * compute / (0.6 * LAYERS * TOP_K)
    computing = off - (walk.waited - waited) / TOKENS
    return off, float(np.median([walk.run(hints) for _ in range(2)])), off - max(computing, reads)


@pytest.mark.parametrize(("ratio", "least"), [(0.5, 0.6), (1.0, 0.5), (2.0, 0.5)])
def test_hints_as_good_as_measured_ones_hide_half_of_what_can_be_hidden(ratio: float, least: float) -> None:
    off, on, hideable = compared(ratio)
    assert (off - on) / hideable >= least


def test_hints_for_a_drive_that_is_always_busy_cost_nothing() -> None:
    off, on, _ = compared(4.0)
    assert off / on >= 1


def test_wrong_hints_are_left_off_and_then_cost_nothing() -> None:
    off, on, _ = compared(1.0, right=False, throttle=Throttle(), settling=4)
    assert off / on >= 0.98
