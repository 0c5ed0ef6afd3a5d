"""Hints for models of random weights: right as often as measured on a real model, drawn from the routes to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.prefetch.throttle import Throttle

__all__ = ["MEASURED_PRECISION", "DrawnHints", "Precision"]

_FIRST_LAYERS: Final = 2
"""Layers that are hinted for by a token alone, as `Hinting` does it."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How often a node's guess of each rank is right, the likeliest first.

    Attributes:
        next_layer: of the layer after the one where the step waits.
        this_token: of the first layer, when the step's token is known.
        last_token: of the first layer, when only the token before it is.
    """

    next_layer: tuple[float, ...]
    this_token: tuple[float, ...]
    last_token: tuple[float, ...]

    def stretched(self, ranks: int) -> Precision:
        """The same for a router that chooses another number of experts."""
        return Precision(*(_stretched(part, ranks) for part in (self.next_layer, self.this_token, self.last_token)))


MEASURED_PRECISION: Final = Precision(
    next_layer=(0.973, 0.901, 0.776, 0.572, 0.288, 0.163, 0.097, 0.061),
    this_token=(0.913, 0.849, 0.762, 0.621, 0.188, 0.123, 0.079, 0.061),
    last_token=(0.358, 0.317, 0.262, 0.222, 0.197, 0.176, 0.171, 0.156),
)
"""Of the embedded model (top-4), on texts that nothing was fitted on; see `bench prefetch`."""


def _stretched(precision: Sequence[float], ranks: int) -> tuple[float, ...]:
    places = np.linspace(0, len(precision) - 1, ranks)
    return tuple(np.interp(places, np.arange(len(precision)), np.asarray(precision)).tolist())


class HintSource(Protocol):
    """What hears the hints: an `ExpertSource`."""

    def absent(self, layer: int) -> NDArray[np.bool_] | None:
        """See `ExpertSource.absent`."""

    def hint(
        self, layer: int, experts: Sequence[int], probabilities: Sequence[float], *, step: int, lead_seconds: float
    ) -> None:
        """See `ExpertSource.hint`."""


class DrawnHints:
    """A `StepHints` that knows the routes and says them rank by rank, each right with a given probability.

    Args:
        source: hears the hints.
        layers: model layers with routed experts, rising.
        experts: of a layer.
        routes: int32 [positions, layers, k], what the model will choose.
        precision: of each rank; it is also what is claimed.
        right: whether guesses are right so often; else each is a random expert that the router will not choose.
        throttle: says how likely a guess must be; it is told what steps cost.
        lead_seconds: from one layer to the next, as it is told.
    """

    def __init__(
        self,
        source: HintSource,
        layers: Sequence[int],
        experts: int,
        routes: NDArray[np.int32],
        precision: Precision,
        *,
        right: bool,
        throttle: Throttle,
        lead_seconds: float,
    ) -> None:
        self.throttle = throttle
        self._source = source
        self._layers = list(layers)
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._experts = experts
        self._routes = routes
        self._precision = precision
        self._right = right
        self._lead = lead_seconds
        self._position = -1
        self._step = 0
        self._foreseen = False
        # Drawing takes longer than what a node does instead of it.
        self._drawn: dict[tuple[int, int, int], list[int]] = {}

    @property
    def active(self) -> bool:
        """Whether this step is one to be looked ahead of."""
        return self.throttle.level > 0

    def restart(self, position: int = 0) -> None:
        """The next step is at this position of the text."""
        self._position = position - 1

    def begin(self, tokens: Sequence[int], *, step: int, decode: bool) -> None:
        """A step begins that computes on one token: hint for its first layers."""
        del tokens, decode
        self._position += 1
        self._step = step
        self._foreseen = False
        if self.active:
            for place in range(min(_FIRST_LAYERS, len(self._layers))):
                self._hint(place, self._precision.this_token, self._lead * (place + 1))

    def at(self, layer: int, routes: NDArray[np.int32]) -> None:
        """Nothing is learned here."""

    def meanwhile(self, layer: int, known: NDArray[np.float32]) -> None:
        """Hint for the layer after the one where the step waits; behind the last one, for the next step."""
        del known
        place = self._places[layer] + 1
        if place < len(self._layers):
            self._hint(place, self._precision.next_layer, self._lead)
        elif not self._foreseen:
            self._foreseen = True
            for first in range(min(_FIRST_LAYERS, len(self._layers))):
                self._hint(first, self._precision.last_token, self._lead * (first + 1), later=1)

    def end(self, seconds: float) -> None:
        """The step is complete; it took so long."""
        self.throttle.token(seconds)

    def _hint(self, place: int, precision: Sequence[float], lead: float, later: int = 0) -> None:
        guesses = self._draw(place, precision, self._position + later)
        absent = self._source.absent(self._layers[place])
        if absent is None:
            return
        least = self.throttle.least
        said = [(e, p) for e, p in zip(guesses, precision, strict=False) if absent[e] and p >= least]
        if said:
            experts, claimed = map(list, zip(*said, strict=True))
            self._source.hint(self._layers[place], experts, claimed, step=self._step + later, lead_seconds=lead)

    def _draw(self, place: int, precision: Sequence[float], position: int) -> list[int]:
        """Guesses for a layer: the same ones whenever this position comes again."""
        position %= len(self._routes)
        key = (position, place, id(precision))
        if key not in self._drawn:
            self._drawn[key] = self._guesses(place, precision, position)
        return self._drawn[key]

    def _guesses(self, place: int, precision: Sequence[float], position: int) -> list[int]:
        generator = np.random.Generator(np.random.Philox(key=[position, place]))
        wanted = self._routes[position, place].tolist()
        others = np.setdiff1d(np.arange(self._experts), wanted)
        pool = generator.permutation(others).tolist()
        guesses: list[int] = []
        for hit in generator.random(len(precision)) < np.asarray(precision):
            source = wanted if self._right and hit and wanted else pool
            if source:
                guesses.append(source.pop(0))
        return guesses
