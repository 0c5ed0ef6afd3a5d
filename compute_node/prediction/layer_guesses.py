"""What was learned of all layers, from every distance: one object to keep between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from numpy.typing import NDArray

from compute_node.prediction.layer_guess import LayerGuess

__all__ = ["BY_LAST_TOKEN", "FARTHEST", "LayerGuesses"]

FARTHEST: Final = 2
"""Layers ahead up to which a state is asked."""
BY_LAST_TOKEN: Final = FARTHEST + 1
"""In place of a distance: from the token of the step before, while nobody knows the step's own."""


class LayerGuesses:
    """A `LayerGuess` for each layer and distance: 0 is from the token alone, n from the state of the n-th layer before.

    The last "distance" is `BY_LAST_TOKEN`.

    Args:
        experts: of the layers with routed experts, by place.
        top_k: that a router chooses.
    """

    def __init__(self, experts: Sequence[int], top_k: int) -> None:
        self._layers = [
            [LayerGuess(count, top_k, maps=0 < distance <= FARTHEST) for count in experts]
            for distance in range(BY_LAST_TOKEN + 1)
        ]

    def of(self, distance: int, place: int) -> LayerGuess:
        """The guess for a layer, by its place, from a distance."""
        return self._layers[distance][place]

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """The content, for a file: arrays of each `LayerGuess` under `distance.place.`."""
        return {
            f"{distance}.{place}.{name}": array
            for distance, layers in enumerate(self._layers)
            for place, layer in enumerate(layers)
            for name, array in layer.as_arrays().items()
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes the content of `as_arrays`; UsageError if it is none for this model's layers.

        What was taken before the fault was found stays: each layer is right or wrong by itself.
        """
        for distance, layers in enumerate(self._layers):
            for place, layer in enumerate(layers):
                prefix = f"{distance}.{place}."
                layer.restore({n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)})
