"""A layer's experts applied to rows that came from elsewhere: the kernels and the order of a node's own step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.executor import Executor
from compute_node.engine.expert_step import ExpertPoint
from compute_node.kernels import NUMERICS, Batch, QuantisedRows, Segment, quantise_rows, quantises
from tierd.client.source import ExpertSource, Phase
from tierd.errors import LimitExceeded, UsageError

__all__ = ["ExpertWork", "WorkDone"]

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Results of one request.

    Attributes:
        outputs: float32 [pairs, H], one row for each expert that was wanted, row by row, in a copy of their own.
        outcomes: how the source came by the experts, by outcome.
    """

    outputs: F32
    outcomes: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Buffers:
    """See `compute_node.engine.expert_step.ExpertBuffers`."""

    expert_input: F32
    expert_quantised: QuantisedRows | None
    expert_rows: F32
    route_indices: I32
    route_weights: F32


class ExpertWork:
    """Computes requests one after the other; one thread at a time.

    A node with the same store, numerics and kernel path computes the very same bits: the input is quantised by the
    same kernel, each (row, rank) pair has a row of its own, and no dot product depends on how many rows there are.

    Args:
        source: brings the experts.
        numerics: of the kernels.
        threads: native threads; None: the cores that this process may use.
        rows: most rows of a request.

    Raises:
        UsageError: unknown numerics.
    """

    def __init__(self, source: ExpertSource, *, numerics: str, threads: int | None, rows: int) -> None:
        if numerics not in NUMERICS:
            raise UsageError(f"unknown numerics {numerics!r}", hint=f"Known: {', '.join(NUMERICS)}.")
        geometry = source.store.manifest.geometry
        self.rows, self.hidden, self.top_k = rows, geometry.hidden_size, geometry.top_k
        self._geometry = geometry
        self._source = source
        self._executor = Executor(threads)
        wants_bytes = any(quantises(numerics, layout.format) for layout in geometry.layouts)
        self._buffers = buffers = _Buffers(
            expert_input=np.zeros((rows, self.hidden), np.float32),
            expert_quantised=QuantisedRows(rows, self.hidden) if wants_bytes else None,
            expert_rows=np.zeros((rows, self.top_k, self.hidden), np.float32),
            route_indices=np.full((rows, self.top_k), -1, np.int32),
            route_weights=np.zeros((rows, self.top_k), np.float32),
        )
        self._batch = Batch(rows)
        self._prepare = None
        if buffers.expert_quantised is not None:
            op = quantise_rows("input as bytes", buffers.expert_input, buffers.expert_quantised, self._batch)
            self._prepare = Segment("input", [op])
        self._point = ExpertPoint(source, geometry, buffers, self._executor, numerics=numerics)

    @property
    def threads(self) -> int:
        """Native threads that compute."""
        return int(self._executor.threads)

    def check(self, layer: int, inputs: F32, experts: I32) -> None:
        """Refuse a request that cannot be computed.

        Raises:
            LimitExceeded: another shape, or experts that the store does not have.
        """
        count = len(inputs)
        if not 0 < count <= self.rows:
            raise LimitExceeded(f"a request of {count} rows; 1 to {self.rows} are computed at once")
        if inputs.shape != (count, self.hidden) or experts.shape != (count, self.top_k):
            raise LimitExceeded(
                f"rows of {inputs.shape[1:]} with {experts.shape[1:]} experts do not fit a model of width "
                f"{self.hidden} with {self.top_k}"
            )
        total = self._geometry.experts_in(layer)
        if experts.min() < -1 or experts.max() >= total:
            raise LimitExceeded(f"experts of layer {layer} are 0 to {total - 1}, or -1 for none")
        if experts.max() < 0:
            raise LimitExceeded("the request wants no expert")

    def compute(self, layer: int, inputs: F32, experts: I32, *, step: int, phase: Phase) -> WorkDone:
        """Apply experts to rows.

        Args:
            layer: model layer number.
            inputs: float32 [rows, H].
            experts: int32 [rows, top_k], numbers in the layer, -1 for none.
            step: of the node.
            phase: for the counters.

        Raises:
            LimitExceeded: a request that cannot be computed.
            TierdError: of the expert source.
        """
        self.check(layer, inputs, experts)
        count, buffers, stats = len(inputs), self._buffers, self._source.stats
        before = dict(stats.outcomes)
        buffers.expert_input[:count] = inputs
        buffers.route_indices[:count] = experts
        self._batch.set_rows(count)
        if self._prepare is not None:
            self._executor.run(self._prepare)
        self._point.run(layer, count, step=step, phase=phase)
        return WorkDone(
            buffers.expert_rows[:count][experts >= 0],
            {name: total - before.get(name, 0) for name, total in stats.outcomes.items()},
        )

    def close(self) -> None:
        """End the native threads. May be called more than once."""
        self._executor.close()
