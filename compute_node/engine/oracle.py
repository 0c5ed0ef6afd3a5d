"""Compares a model with what transformers computed from the same checkpoint: logits, greedy tokens, routes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.model import Model
from compute_node.engine.sampler import Sampling, choose_token
from tierd.array_files import read_arrays
from tierd.client.source import Phase
from tierd.errors import UsageError

__all__ = ["TOLERANCE", "OracleReference", "OracleResult", "compare", "read_reference"]

TOLERANCE: Final = 1e-4
"""Largest accepted difference of a logit, where the reference's logits have a standard deviation of about 1."""


@dataclass(frozen=True, slots=True)
class OracleReference:
    """What another implementation computed.

    Attributes:
        input_ids: the prompt.
        logits: float32 [prompt, vocabulary].
        greedy: tokens that follow, by cached greedy decoding.
        greedy_logits: float32 [len(greedy), vocabulary] that each of them was chosen from, or None.
        routes: per layer int [prompt, top_k], experts of each prompt token, ascending.
        route_weights: per layer float32 [prompt, top_k] in the same order.
    """

    input_ids: list[int]
    logits: NDArray[np.float32]
    greedy: list[int]
    greedy_logits: NDArray[np.float32] | None
    routes: dict[int, NDArray[np.int64]]
    route_weights: dict[int, NDArray[np.float32]]

    @property
    def scale(self) -> float:
        """Standard deviation of the logits, at least 1: errors are measured against it."""
        return max(1.0, float(self.logits.std()))


@dataclass(frozen=True, slots=True)
class OracleResult:
    """How a model compares.

    Attributes:
        max_logit_error: largest difference of any logit, prompt and greedy steps, divided by the reference's scale.
        greedy: the tokens that the model chose.
        greedy_equal: how many of them equal the reference's, counted from the first up to the first that differs.
        routes_equal: whether all experts of all prompt tokens in all layers are the reference's.
        max_route_weight_error: largest difference of a router weight where the experts agree.
        logits: float32 [prompt + greedy - 1, vocabulary], behind each token of the prompt and of the reference's
            greedy ones.
        routes: per layer int [prompt + greedy - 1, top_k], experts of these tokens, ascending.
    """

    max_logit_error: float
    greedy: list[int]
    greedy_equal: int
    routes_equal: bool
    max_route_weight_error: float
    logits: NDArray[np.float32]
    routes: dict[int, NDArray[np.int64]]

    @property
    def passed(self) -> bool:
        """Logits within tolerance, and every token and route exact."""
        return (
            self.max_logit_error <= TOLERANCE
            and self.max_route_weight_error <= TOLERANCE
            and self.greedy_equal == len(self.greedy)
            and self.routes_equal
        )


_MOST_BYTES: Final = 1 << 30


def read_reference(path: Path) -> OracleReference:
    """Reads a `ref.npz`; UsageError if it is missing or not one."""
    try:
        data = read_arrays(path, limit=_MOST_BYTES)
        layers = sorted(int(name.removeprefix("route_idx_")) for name in data if name.startswith("route_idx_"))
        return OracleReference(
            input_ids=[int(token) for token in data["input_ids"].reshape(-1)],
            logits=data["logits"].reshape(-1, data["logits"].shape[-1]).astype(np.float32),
            greedy=[int(token) for token in data["greedy"].reshape(-1)],
            greedy_logits=data["greedy_logits"].astype(np.float32) if "greedy_logits" in data else None,
            routes={layer: data[f"route_idx_{layer}"].astype(np.int64) for layer in layers},
            route_weights={layer: data[f"route_w_{layer}"].astype(np.float32) for layer in layers},
        )
    except (OSError, KeyError, ValueError, TypeError, IndexError) as error:
        raise UsageError(
            f"{path} is not a reference of an oracle: {error}", hint="Oracle folders are made by make_oracles.py."
        ) from None


def compare(model: Model, reference: OracleReference) -> OracleResult:
    """Runs the prompt in chunks, then decodes greedily with the cache, and compares all of it."""
    routes: dict[int, list[NDArray[np.int64]]] = {layer: [] for layer in reference.routes}
    weights: dict[int, list[NDArray[np.float32]]] = {layer: [] for layer in reference.routes}

    def observe(layer: int, indices: NDArray[np.int32], chosen: NDArray[np.float32]) -> None:
        order = np.argsort(indices, axis=1)
        routes.setdefault(layer, []).append(np.take_along_axis(indices, order, 1).astype(np.int64))
        weights.setdefault(layer, []).append(np.take_along_axis(chosen, order, 1).copy())

    sequence = model.cache.take()
    prompt, chunks = reference.input_ids, []
    for start in range(0, len(prompt), model.rows):
        chunk = prompt[start : start + model.rows]
        logits = model.extend(sequence, chunk, phase=Phase.PREFILL, logits_of=range(len(chunk)), observe=observe)
        assert logits is not None
        chunks.append(logits)
    computed = np.concatenate(chunks)
    errors = [_largest(computed, reference.logits)]
    last, greedy, rows = computed[-1], [], [computed]
    for step in range(len(reference.greedy)):
        if reference.greedy_logits is not None:
            errors.append(_largest(last, reference.greedy_logits[step]))
        greedy.append(choose_token(last, len(prompt) + step, Sampling()))
        # The reference's token goes on, so that one difference does not hide what follows.
        logits = model.extend(sequence, [reference.greedy[step]], phase=Phase.DECODE, observe=observe)
        assert logits is not None
        last = logits[0]
        rows.append(logits)
    model.cache.give_back(sequence)
    equal = next(
        (place for place, pair in enumerate(zip(greedy, reference.greedy, strict=True)) if pair[0] != pair[1]),
        len(greedy),
    )
    known = len(prompt) + len(greedy) - 1
    experts = {layer: np.concatenate(parts)[:known] for layer, parts in routes.items() if parts}
    routes_equal = set(experts) == set(reference.routes) and all(
        np.array_equal(experts[layer][: len(expected)], expected) for layer, expected in reference.routes.items()
    )
    weight_errors = [
        _largest(np.concatenate(weights[layer])[: len(expected)], expected)
        for layer, expected in reference.route_weights.items()
        if routes_equal
    ]
    return OracleResult(
        float(np.max(errors)) / reference.scale,
        greedy,
        equal,
        routes_equal,
        float(np.max(weight_errors, initial=0.0)),
        np.concatenate(rows)[:known],
        experts,
    )


def _largest(computed: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Largest difference; infinite where the shapes differ, not a number where a value is not."""
    return float(np.abs(computed - expected).max()) if computed.shape == expected.shape else float("inf")
