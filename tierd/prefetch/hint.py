"""What a node may say about the experts that it will probably want, and how much of that is taken seriously."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

__all__ = ["Hint", "likeliest"]

_MOST_LEAD_SECONDS = 60.0


class Hint(NamedTuple):
    """Experts of one layer that a session will probably want. It replaces the session's last hint for the layer.

    Attributes:
        step: decode step or prefill chunk that will want them, as in `AcquireRequest`.
        layer: model layer number.
        experts: expert numbers; none takes the last hint for the layer back.
        probabilities: one per expert, 0 to 1; missing ones count as 1.
        lead: seconds until the layer is expected to start; 0 is unknown.
    """

    step: int
    layer: int
    experts: tuple[int, ...]
    probabilities: tuple[float, ...] = ()
    lead: float = 0.0

    def due(self, now: float) -> float | None:
        """When the layer is expected to start, on the clock of `now`; None if that is unknown."""
        return now + min(self.lead, _MOST_LEAD_SECONDS) if self.lead > 0 else None


def likeliest(experts: Sequence[int], probabilities: Sequence[float], most: int) -> list[tuple[int, float]]:
    """The `most` likeliest of the experts, with their probabilities, the likeliest first.

    Experts named again, and those with a probability outside 0 (exclusive) to 1, are left out.
    """
    missing = len(experts) - len(probabilities)
    if missing > 0:
        probabilities = [*probabilities, *[1.0] * missing]
    named: dict[int, float] = {}
    for expert, probability in zip(experts, probabilities, strict=False):
        if expert not in named and 0 < probability <= 1:
            named[expert] = probability
    return sorted(named.items(), key=itemgetter(1), reverse=True)[:most]
