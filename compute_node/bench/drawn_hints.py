"""Hints for models of random weights: right as often as measured on a real model, drawn from the routes to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from compute_node.prediction.hinting import LOOKED_ON_STEPS
from tierd.prefetch.throttle import Throttle

__all__ = ["MEASURED", "DrawnHints", "Foreseen", "Named"]

_FIRST_LAYERS: Final = 2
"""Layers that are hinted for by a token alone, as `Hinting` does it."""
_PRIOR: Final = 4.0
"""Experts that count as rightly named before any was."""


@dataclass(frozen=True, slots=True)
class Named:
    """What a node names of the experts that a layer lacks, the likeliest first: one number for each likelihood.

    Attributes:
        probabilities: how likely it calls them, and how many of those came true.
        right: share of all missing experts that are named with it; what is left of 1 is never named.
        wrong: experts that are named with it and not wanted, for each missing one.
    """

    probabilities: tuple[float, ...]
    right: tuple[float, ...]
    wrong: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What a node names, by what it goes by.

    Attributes:
        next_layer: of the layer after the one where the step is.
        second_layer: of the one after that.
        this_token: of the first layer, when the step's token is known.
        next_step: of the first layer, by the last layer of the step before, when nobody knows the step's token.
    """

    next_layer: Named
    second_layer: Named
    this_token: Named
    next_step: Named


MEASURED: Final = Foreseen(
    next_layer=Named(
        (0.985, 0.921, 0.857, 0.763, 0.643, 0.536, 0.464, 0.366, 0.244, 0.144, 0.071),
        (0.322, 0.081, 0.113, 0.065, 0.080, 0.076, 0.041, 0.023, 0.088, 0.036, 0.034),
        (0.005, 0.007, 0.019, 0.020, 0.044, 0.066, 0.047, 0.040, 0.272, 0.211, 0.442),
    ),
    second_layer=Named(
        (0.977, 0.922, 0.852, 0.745, 0.659, 0.554, 0.451, 0.362, 0.246, 0.140, 0.071),
        (0.135, 0.069, 0.115, 0.090, 0.076, 0.072, 0.068, 0.080, 0.091, 0.080, 0.056),
        (0.003, 0.006, 0.020, 0.031, 0.039, 0.058, 0.082, 0.140, 0.280, 0.493, 0.736),
    ),
    this_token=Named(
        (0.958, 0.924, 0.905, 0.725, 0.639, 0.629, 0.426, 0.342, 0.237, 0.150, 0.065),
        (0.190, 0.314, 0.097, 0.034, 0.048, 0.019, 0.013, 0.057, 0.043, 0.085, 0.034),
        (0.008, 0.026, 0.010, 0.013, 0.027, 0.011, 0.017, 0.109, 0.139, 0.483, 0.490),
    ),
    next_step=Named(
        (0.921, 0.800, 0.815, 0.676, 0.631, 0.552, 0.473, 0.349, 0.239, 0.133, 0.074),
        (0.007, 0.005, 0.013, 0.015, 0.027, 0.044, 0.047, 0.073, 0.130, 0.298, 0.225),
        (0.001, 0.001, 0.003, 0.007, 0.016, 0.036, 0.052, 0.135, 0.413, 1.934, 2.824),
    ),
)
"""Of the embedded model (top-4, a quarter of the experts in RAM), on texts that nothing was fitted on; see `bench
prefetch`."""


class HintSource(Protocol):
    """What hears the hints: an `ExpertSource`."""

    def absent(self, layer: int) -> NDArray[np.bool_] | None:
        """See `ExpertSource.absent`."""

    def hint(
        self, layer: int, experts: Sequence[int], probabilities: Sequence[float], *, step: int, lead_seconds: float
    ) -> None:
        """See `ExpertSource.hint`."""


class DrawnHints:
    """A `StepHints` that knows the routes, and names of the missing experts as many, and as many others, as measured.

    Args:
        source: hears the hints.
        layers: model layers with routed experts, rising.
        experts: of a layer.
        routes: int32 [positions, layers, k], what the model will choose.
        foreseen: what is named, and how likely it is called.
        right: whether guesses come true so often; else each is an expert that the router will not choose.
        throttle: says how likely a guess must be; it is told what steps cost.
        lead_seconds: from one layer to the next, as it is told.
    """

    def __init__(
        self,
        source: HintSource,
        layers: Sequence[int],
        experts: int,
        routes: NDArray[np.int32],
        foreseen: Foreseen,
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
        self._foreseen = foreseen
        self._right = right
        self._lead = lead_seconds
        self._position = -1
        self._step = 0
        self._done = False
        self._said: list[Sequence[int]] = [()] * len(self._layers)  # by place, the experts that were hinted last
        self._passed = -1
        self._lacked = 0  # the last step that lacked something
        self._open: dict[tuple[int, int], list[tuple[int, float]]] = {}  # by step and place, what was named
        self._claimed, self._right_ones = _PRIOR, _PRIOR
        # Of the experts that a layer lacks, wanted and other ones so far: others are named in proportion to the former.
        self._lacking = np.array([1.0, experts / routes.shape[2]])
        self._drawn: dict[tuple[int, int, int], list[tuple[int, float]]] = {}

    @property
    def active(self) -> bool:
        """Whether this step is one to be looked ahead of."""
        return self.throttle.level > 0

    @property
    def everywhere(self) -> bool:
        """Whether that goes for its layers that lack nothing, too: not where nothing ever lacks."""
        return self.active and not self.asleep

    @property
    def asleep(self) -> bool:
        """See `StepHints.asleep`."""
        return self._step - self._lacked > LOOKED_ON_STEPS

    def restart(self, position: int = 0) -> None:
        """The next step is at this position of the text."""
        self._position = position - 1

    def begin(self, tokens: Sequence[int], *, step: int, decode: bool) -> None:
        """A step begins that computes on one token: hint for its first layers."""
        del tokens, decode
        self._position += 1
        self._step = step
        self._done = False
        self._passed = -1
        self._said = [()] * len(self._layers)
        self._open = {key: said for key, said in self._open.items() if key[0] >= step}
        if self.active:
            for place in range(min(_FIRST_LAYERS, len(self._layers))):
                self._hint(place, self._foreseen.this_token, self._lead * (place + 1))

    def passing(self, layer: int, routes: NDArray[np.int32]) -> None:
        """Hint before a layer is computed that lacks nothing but what was hinted."""
        absent, place, chosen = self._source.absent(layer), self._places[layer], routes.ravel().tolist()
        if absent is not None and not any(absent[expert] and expert not in self._said[place] for expert in chosen):
            self._learn(place, chosen)
            self._passed = place
            self._look_ahead(place)

    def at(self, layer: int, routes: NDArray[np.int32]) -> None:
        """The step stops because something is missing: learn how far guesses come true, as a node does."""
        self._lacked = self._step
        self._learn(self._places[layer], routes.ravel().tolist())

    def meanwhile(self, layer: int, known: NDArray[np.float32]) -> None:
        """Hint where the step waits."""
        del known
        if self._places[layer] != self._passed:
            self._look_ahead(self._places[layer])

    def end(self, seconds: float) -> None:
        """The step is complete; it took so long."""
        self.throttle.token(seconds)

    def _look_ahead(self, place: int) -> None:
        """Hint for the two layers after this one; behind the last one, for the next step."""
        foreseen = self._foreseen
        for distance, named in enumerate((foreseen.next_layer, foreseen.second_layer), start=1):
            if place + distance < len(self._layers):
                self._hint(place + distance, named, distance * self._lead)
        if place + 1 == len(self._layers) and not self._done:
            self._done = True
            for first in range(min(_FIRST_LAYERS, len(self._layers))):
                self._hint(first, foreseen.next_step, self._lead * (first + 1), later=1)

    def _hint(self, place: int, named: Named, lead: float, later: int = 0) -> None:
        absent = self._source.absent(self._layers[place])
        if absent is None or not absent.any():
            return
        position, least = (self._position + later) % len(self._routes), self.throttle.least
        likely = self._likely(position, place, named, absent)
        said = [(expert, p) for expert, p in likely if p >= least and absent[expert]]
        if not said:
            return
        self._open[self._step + later, place] = said
        experts, probabilities = map(list, zip(*said, strict=True))
        if probabilities[0] * self._right_ones >= least * self._claimed:
            self._lacked = self._step
            self._said[place] = experts
            self._source.hint(self._layers[place], experts, probabilities, step=self._step + later, lead_seconds=lead)

    def _learn(self, place: int, chosen: Sequence[int]) -> None:
        """How far guesses come true; a node that is always wrong falls silent."""
        for expert, probability in self._open.pop((self._step, place), ()):
            self._claimed += probability
            self._right_ones += expert in chosen

    def _likely(self, position: int, place: int, named: Named, absent: NDArray[np.bool_]) -> list[tuple[int, float]]:
        """The experts that are named if they are missing, and how likely they are called, the likeliest first.

        It is the same whenever a position comes again: drawing takes longer than what a node does instead of it.
        """
        key = (position, place, id(named))
        if key not in self._drawn:
            wanted = np.zeros(self._experts, np.bool_)
            wanted[self._routes[position, place]] = True
            self._lacking += (absent & wanted).sum(), (absent & ~wanted).sum()
            likely = self._draw(position, place, named, wanted)
            order = np.argsort(-likely, kind="stable")[: np.count_nonzero(likely)]
            self._drawn[key] = list(zip(order.tolist(), likely[order].tolist(), strict=True))
        return self._drawn[key]

    def _draw(self, position: int, place: int, named: Named, wanted: NDArray[np.bool_]) -> NDArray[np.float64]:
        """How likely each expert is called if it is missing, 0 where it is not named: float64 [experts]."""
        # What two layers before is guessed wrongly need not be what one layer before is.
        far = named is self._foreseen.second_layer
        generator = np.random.Generator(np.random.Philox(key=[position, place + far * len(self._layers)]))
        chance = generator.random(self._experts)
        called = np.array([*named.probabilities, 0.0])
        share = self._lacking[0] / self._lacking[1]
        wrong, right = called[np.searchsorted(np.cumsum(named.wrong) * share, chance)], np.cumsum(named.right)
        if self._right:
            return np.where(wanted, called[np.searchsorted(right, chance)], wrong)
        # As many others are called what the missing ones would have been.
        instead = called[np.searchsorted(right * share, generator.random(self._experts))]
        return np.where(wanted, 0.0, np.maximum(wrong, instead))
