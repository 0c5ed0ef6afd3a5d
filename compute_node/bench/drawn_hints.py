"""Hints for models of random weights: right as often as measured on a real model, drawn from the routes to come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierd.client.source import ExpertSource
from tierd.prefetch.throttle import Throttle

__all__ = ["MEASURED_PRECISION", "DrawnHints", "stretched"]

MEASURED_PRECISION: Final = (0.969, 0.894, 0.764, 0.564, 0.298, 0.170, 0.102, 0.063)
"""How often the node's guess of each rank was right on the embedded model (top-4) and texts that nothing was fitted on;
see `bench prefetch`."""


def stretched(precision: Sequence[float], ranks: int) -> list[float]:
    """The same for a router that chooses another number of experts."""
    places = np.linspace(0, len(precision) - 1, ranks)
    found: list[float] = np.interp(places, np.arange(len(precision)), np.asarray(precision)).tolist()
    return found


class DrawnHints:
    """A `StepHints` that knows the routes and says them rank by rank, each right with a given probability.

    Args:
        source: hears the hints.
        layers: model layers with routed experts, rising.
        experts: of a layer.
        routes: int32 [positions, layers, k], what the model will choose.
        precision: of each rank, the likeliest first; it is also what is claimed.
        right: whether guesses are right so often; else each is a random expert that the router will not choose.
        throttle: says how likely a guess must be; it is told what steps cost.
        lead_seconds: until the next layer starts, as it is told.
    """

    def __init__(
        self,
        source: ExpertSource,
        layers: Sequence[int],
        experts: int,
        routes: NDArray[np.int32],
        precision: Sequence[float],
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
        self._precision = list(precision)
        self._right = right
        self._lead = lead_seconds
        self._position = -1
        self._step = 0

    @property
    def active(self) -> bool:
        """Whether this step is one to be looked ahead of."""
        return self.throttle.level > 0

    def restart(self, position: int = 0) -> None:
        """The next step is at this position of the text."""
        self._position = position - 1

    def begin(self, tokens: Sequence[int], *, step: int, decode: bool) -> None:
        """A step begins that computes on one token."""
        del tokens, decode
        self._position += 1
        self._step = step

    def at(self, layer: int, routes: NDArray[np.int32]) -> None:
        """Nothing is learned here."""

    def meanwhile(self, layer: int, known: NDArray[np.float32]) -> None:
        """Hint for the layer after the one where the step waits."""
        del known
        place = self._places[layer] + 1
        if place == len(self._layers):
            return
        guesses, claimed = self._draw(place)
        absent = self._source.absent(self._layers[place])
        if absent is None:
            return
        said = [n for n, expert in enumerate(guesses) if absent[expert] and claimed[n] >= self.throttle.least]
        if said:
            self._source.hint(
                self._layers[place],
                [guesses[n] for n in said],
                [claimed[n] for n in said],
                step=self._step,
                lead_seconds=self._lead,
            )

    def end(self, seconds: float) -> None:
        """The step is complete; it took so long."""
        self.throttle.token(seconds)

    def _draw(self, place: int) -> tuple[list[int], list[float]]:
        """Guesses for a layer and what is claimed of them: the same ones whenever this position comes again."""
        position = self._position % len(self._routes)
        generator = np.random.Generator(np.random.Philox(key=[position, place]))
        wanted = self._routes[position, place].tolist()
        others = [expert for expert in generator.permutation(self._experts).tolist() if expert not in wanted]
        guesses = []
        for precision in self._precision:
            hit = self._right and wanted and generator.random() < precision
            pool = wanted if hit else others
            if pool:
                guesses.append(pool.pop(0))
        return guesses, self._precision[: len(guesses)]
