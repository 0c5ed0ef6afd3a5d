"""What is left to do of one layer of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tierd.client.source import Phase, Use

__all__ = ["Visit"]


@dataclass(slots=True)
class Visit:
    """What is left of a call of `visit`.

    Attributes:
        layer: model layer.
        first: flat number of its expert 0.
        use: the caller's.
        step: the caller's.
        phase: the caller's.
        meanwhile: the caller's, until it was called.
        fresh: experts that nobody counted yet.
        torn: the same, but their bytes changed under use: they are asked for, so that they stay.
        again: counted by the daemon, and to be asked for again.
    """

    layer: int
    first: int
    use: Use
    step: int
    phase: Phase
    meanwhile: Callable[[], None] | None
    fresh: list[int]
    torn: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)

    def spend_free_time(self) -> None:
        """The missing experts have been asked for: the caller may do something else once."""
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()

    def drop(self, experts: Iterable[int]) -> None:
        """These are done, or were put elsewhere."""
        dropped = set(experts)
        for left in (self.fresh, self.torn, self.again):
            left[:] = [expert for expert in left if expert not in dropped]
