"""What prefetch hides of the waiting, and what wrong hints cost, in numbers that do not depend on the machine."""

from __future__ import annotations

import numpy as np
import pytest
from simulation.prefetch_gain import Pace, Walk

from compute_node.bench.drawn_hints import MEASURED, DrawnHints
from tierd.policy.drawn_routes import RECORDED
from tierd.prefetch.throttle import SECOND_WINDOW, Throttle

LAYERS, EXPERTS, TOP_K, TOKENS, SLOTS = 8, 64, 8, 32, 256


def plain(walk: Walk) -> tuple[float, float, float]:
    """A run without hints: seconds per token, of these computing, and misses per token."""
    missed, waited = walk.missed, walk.waited
    seconds = walk.run(None)
    return seconds, seconds - (walk.waited - waited) / TOKENS, (walk.missed - missed) / TOKENS


def compared(
    ratio: float, *, right: bool = True, throttle: Throttle | None = None, settling: int = 1, rounds: int = 2
) -> tuple[float, float, float]:
    """Seconds per token without and with hints, and the seconds per token that could be hidden."""
    routes = RECORDED.generate(tokens=TOKENS, layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
    finding = Walk(routes, EXPERTS, SLOTS, Pace())
    finding.run(None)
    _, compute, missed = plain(finding)
    read = ratio * compute / missed
    daemons = Throttle(window=SECOND_WINDOW) if throttle is not None else None
    walk = Walk(routes, EXPERTS, SLOTS, Pace(read=read), daemons)
    hints = DrawnHints(
        walk, range(LAYERS), EXPERTS, routes, MEASURED, right=right,
        throttle=throttle or Throttle(fixed=True), lead_seconds=2 * (1 + ratio) * compute / LAYERS,
    )  # fmt: skip
    walk.run(None)
    for _ in range(settling):
        walk.run(hints)
    off, computing, missed = plain(walk)
    return off, float(np.median([walk.run(hints) for _ in range(rounds)])), off - max(computing, missed * read)


@pytest.mark.parametrize(("ratio", "least"), [(0.5, 0.6), (1.0, 0.45), (2.0, 0.5)])
def test_hints_as_good_as_measured_ones_hide_about_half_of_what_can_be_hidden(ratio: float, least: float) -> None:
    off, on, hideable = compared(ratio)
    assert (off - on) / hideable >= least


def test_throttles_that_try_less_and_more_of_it_leave_most_of_the_gain() -> None:
    off, on, hideable = compared(1.0, throttle=Throttle(), settling=4, rounds=4)
    assert (off - on) / hideable >= 0.4


def test_hints_for_a_drive_that_is_always_busy_cost_nothing() -> None:
    off, on, _ = compared(4.0)
    assert off / on >= 1


def test_wrong_hints_are_not_believed_and_then_cost_nothing() -> None:
    off, on, _ = compared(1.0, right=False, throttle=Throttle(), settling=4)
    assert off / on >= 0.98
