"""The eviction policies by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierd.errors import UsageError
from tierd.policy.lru import Lru

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierd.policy.policy import EvictionPolicy

__all__ = ["POLICIES", "make_policy"]

POLICIES: Final[dict[str, Callable[[], EvictionPolicy]]] = {Lru.name: Lru}
"""What makes a policy, by its name."""


def make_policy(name: str) -> EvictionPolicy:
    """A new, empty policy; UsageError that lists the known names for an unknown one."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise UsageError(
            f"there is no eviction policy named {name!r}", hint=f"Known policies: {', '.join(sorted(POLICIES))}."
        ) from None
