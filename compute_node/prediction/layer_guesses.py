"""What was learned of all layers, from every distance: one object to keep between runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from numpy.typing import NDArray

from compute_node.prediction.layer_guess import LayerGuess
from compute_node.prediction.next_guess import NextGuess

__all__ = ["FARTHEST", "LayerGuesses"]

FARTHEST: Final = 2
"""Layers ahead up to which a state is asked."""
_NEXT_STEP: Final = "next"


class LayerGuesses:
    """A `LayerGuess` for each layer and distance: 0 is from the token alone, n from the state of the n-th layer before.

    And a `NextGuess` for each layer: from the step before, while nobody knows the step's own token.

    Args:
        experts: of the layers with routed experts, by place.
        top_k: that a router chooses.
    """

    def __init__(self, experts: Sequence[int], top_k: int) -> None:
        self._layers = [
            [LayerGuess(count, top_k, maps=0 < distance <= FARTHEST) for count in experts]
            for distance in range(FARTHEST + 1)
        ]
        self._next = [NextGuess() for _ in experts]

    def of(self, distance: int, place: int) -> LayerGuess:
        """The guess for a layer, by its place, from a distance."""
        return self._layers[distance][place]

    def next_step(self, place: int) -> NextGuess:
        """The guess for a layer of the next step, by its place."""
        return self._next[place]

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """The content, for a file: arrays of each guess under `distance.place.`, of the next step `next.place.`."""
        return {f"{prefix}{name}": array for prefix, part in self._parts() for name, array in part.as_arrays().items()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes the content of `as_arrays`; UsageError if it is none for this model's layers.

        What was taken before the fault was found stays: each layer is right or wrong by itself.
        """
        for prefix, part in self._parts():
            part.restore({n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)})

    def _parts(self) -> Iterator[tuple[str, LayerGuess | NextGuess]]:
        """All guesses, and what the names of their arrays begin with."""
        for distance, layers in enumerate(self._layers):
            yield from ((f"{distance}.{place}.", layer) for place, layer in enumerate(layers))
        yield from ((f"{_NEXT_STEP}.{place}.", guess) for place, guess in enumerate(self._next))
