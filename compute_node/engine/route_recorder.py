"""Records which experts the routers chose, for `tierd replay`."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.policy.trace import TraceWriter
from tierd.store.geometry import Geometry

__all__ = ["RouteRecorder"]


class RouteRecorder:
    """Watches the steps of one model through `observe`, and keeps each one that was completed.

    A step that is watched runs layer by layer from Python instead of as one native program: slower, and the same bits.

    Args:
        path: file that `save` writes.
        geometry: of the store.
    """

    def __init__(self, path: Path, geometry: Geometry) -> None:
        self._layers = [entry.layer for entry in geometry.layers]
        self._chosen: dict[int, NDArray[np.int32]] = {}
        self._text = 0
        self._trace = TraceWriter(
            path,
            layers=self._layers,
            layer_experts=[entry.experts for entry in geometry.layers],
            top_k=geometry.top_k,
            expert_bytes=geometry.slot_bytes,
        )

    @property
    def tokens(self) -> int:
        """Tokens recorded so far."""
        return len(self._trace)

    @property
    def full(self) -> bool:
        """Whether the bound on memory was reached: later steps are not recorded."""
        return self._trace.full

    def begin_text(self) -> None:
        """The steps that follow belong to another text."""
        self._text += 1

    def observe(self, layer: int, indices: NDArray[np.int32], weights: NDArray[np.float32]) -> None:
        """What `Model.extend` calls for each layer: int32 [rows, top_k] expert numbers; weights are not recorded."""
        del weights
        self._chosen[layer] = indices.copy()

    def end_step(self, tokens: Listing[int], *, prefill: bool) -> None:
        """The step that was observed is complete, and computed on these tokens."""
        experts = np.stack([self._chosen.pop(layer) for layer in self._layers], axis=1)
        self._trace.add(tokens, experts, sequence=self._text, prefill=prefill)

    def save(self) -> None:
        """Writes the file; UsageError if it cannot be written."""
        self._trace.save()
