"""What a model's layers see and choose, token by token: the material on which predictors are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.model import Model
from tierd.client.source import Phase

__all__ = ["RoutingStates", "record_states"]

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RoutingStates:
    """One text of T tokens through L layers with experts.

    Attributes:
        tokens: int64 [T].
        residual: float32 [T, L, H], the residual stream after attention.
        logits: float32 [T, L, experts], of the router.
        routes: int32 [T, L, k].
        weighted: float32 [T, L, k, H], what each chosen expert adds to the residual stream.
    """

    tokens: NDArray[np.int64]
    residual: F32
    logits: F32
    routes: NDArray[np.int32]
    weighted: F32


def record_states(model: Model, tokens: NDArray[np.int64]) -> RoutingStates:
    """Runs the tokens through the model as one text, many at a time: routes do not depend on how many."""
    program, count = model.program, len(tokens)
    layers, k = len(program.expert_layers), program.route_indices.shape[1]
    hidden, experts = program.look_ahead.residual.shape[1], program.look_ahead.router_logits.shape[1]
    states = RoutingStates(
        tokens,
        np.empty((count, layers, hidden), np.float32),
        np.empty((count, layers, experts), np.float32),
        np.empty((count, layers, k), np.int32),
        np.empty((count, layers, k, hidden), np.float32),
    )
    places = {layer: place for place, layer in enumerate(program.expert_layers)}
    sequence = model.cache.take()
    for start in range(0, count, model.rows):
        part = slice(start, min(start + model.rows, count))
        rows = part.stop - part.start

        def finish(place: int, part: slice = part, rows: int = rows) -> None:
            """The experts of a layer have written their rows by the time the next layer is observed."""
            states.weighted[part, place] *= program.expert_rows[:rows]

        def observe(layer: int, routes: NDArray[np.int32], weights: F32, part: slice = part, rows: int = rows) -> None:
            place = places[layer]
            if place:
                finish(place - 1, part, rows)
            states.residual[part, place] = program.look_ahead.residual[:rows]
            states.logits[part, place] = program.look_ahead.router_logits[:rows]
            states.routes[part, place] = routes
            states.weighted[part, place] = weights[:, :, None]

        chunk = tokens[part].tolist()
        model.extend(sequence, chunk, phase=Phase.PREFILL, logits_of=(-1,), observe=observe)
        finish(layers - 1, part, rows)
    model.cache.give_back(sequence)
    return states
