"""The eviction policies by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from tierd.errors import UsageError
from tierd.policy.decayed_frequency import DecayedFrequency
from tierd.policy.expected_frequency import ExpectedFrequency
from tierd.policy.least_stale import LeastStale
from tierd.policy.lfru import Lfru
from tierd.policy.lru import Lru
from tierd.policy.policy import EvictionPolicy
from tierd.policy.s3fifo import S3Fifo
from tierd.policy.slru import Slru
from tierd.policy.w_tinylfu import WTinyLfu

__all__ = ["DEFAULT_POLICY", "POLICIES", "make_policy"]

POLICIES: Final[dict[str, Callable[[], EvictionPolicy]]] = {
    policy.name: policy
    for policy in (Lru, Lfru, Slru, DecayedFrequency, LeastStale, S3Fifo, WTinyLfu, ExpectedFrequency)
}
"""What makes a policy, by its name. `decayed-frequency-N`, with a half-life of N steps, is known too."""

DEFAULT_POLICY: Final = ExpectedFrequency.name
"""The winner on held-out routing; tests/bench/README.md has the figures."""

_HALF_LIFE = re.compile(rf"{DecayedFrequency.name}-([1-9][0-9]{{0,8}})")


def make_policy(name: str) -> EvictionPolicy:
    """A new, empty policy; UsageError that lists the known names for an unknown one."""
    if half_life := _HALF_LIFE.fullmatch(name):
        return DecayedFrequency(float(half_life[1]))
    try:
        return POLICIES[name]()
    except KeyError:
        raise UsageError(
            f"there is no eviction policy named {name!r}",
            hint=f"Known policies: {', '.join(sorted(POLICIES))}; decayed-frequency-N has a half-life of N steps.",
        ) from None
