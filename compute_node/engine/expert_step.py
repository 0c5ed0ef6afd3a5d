"""What happens where a program waits for experts: from the router's choices to one float32 row per token and rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.executor import Executor
from compute_node.kernels import ExpertFFN, ExpertLayout, QuantisedRows
from tierd.client.source import ExpertSource, Phase, RowSource
from tierd.errors import StoreDamaged, TierdError
from tierd.store.geometry import Geometry
from tierd.store.records import RecordLayout

__all__ = ["Assignments", "ExpertBuffers", "ExpertPoint", "assign_routes", "kernel_layout"]

Assignments = dict[int, tuple[list[int], list[int]]]
"""Per expert the rows it is applied to, and the router rank it has in each of them."""


class ExpertBuffers(Protocol):
    """What experts read and write; see `DecoderProgram`."""

    @property
    def expert_input(self) -> NDArray[np.float32]:
        """What the experts are applied to: float32 [rows, H]."""

    @property
    def expert_quantised(self) -> QuantisedRows | None:
        """The same as signed bytes, where experts want it."""

    @property
    def expert_rows(self) -> NDArray[np.float32]:
        """One row per token and router rank: float32 [rows, top_k, H]."""

    @property
    def route_indices(self) -> NDArray[np.int32]:
        """Experts in router order, -1 for none: int32 [rows, top_k]."""

    @property
    def route_weights(self) -> NDArray[np.float32]:
        """Their weights: float32 [rows, top_k]."""


def assign_routes(indices: NDArray[np.int32]) -> Assignments:
    """Gathers the rows of each chosen expert.

    Args:
        indices: int32 [rows, top_k], experts of each row in router order, -1 for none.

    Returns:
        Experts in the order in which the router ranked them: first choices of all rows, then second choices, and so on.
    """
    assignments: Assignments = {}
    for rank, column in enumerate(indices.T.tolist()):
        for row, expert in enumerate(column):
            found = assignments.get(expert)
            if expert < 0:
                continue
            if found is None:
                assignments[expert] = ([row], [rank])
            else:
                found[0].append(row)
                found[1].append(rank)
    return assignments


def kernel_layout(layout: RecordLayout, hidden_size: int, intermediate_size: int) -> ExpertLayout:
    """Where the kernels find the parts of a record; -1 for scales and biases that it does not have."""
    offsets = {part.name: part.offset for part in layout.parts}
    if layout.part("gate").shape[0] != intermediate_size or layout.part("down").shape[0] != hidden_size:
        raise StoreDamaged("the record layout does not have the model's expert sizes")
    return ExpertLayout(
        format=layout.format,
        hidden=hidden_size,
        intermediate=intermediate_size,
        gate_data=offsets["gate"],
        gate_scales=offsets.get("gate.scales", -1),
        up_data=offsets["up"],
        up_scales=offsets.get("up.scales", -1),
        down_data=offsets["down"],
        down_scales=offsets.get("down.scales", -1),
        gate_bias=offsets.get("gate.bias", -1),
        up_bias=offsets.get("up.bias", -1),
        down_bias=offsets.get("down.bias", -1),
        activation=layout.activation,
    )


class ExpertPoint:
    """Brings the experts of a layer and applies each to its rows, in whatever order they arrive.

    Every (row, rank) pair has its own row of the program's `expert_rows`, written by exactly one expert and added up
    later in router order: neither the order of arrival nor a second call for the same expert can change a bit.

    Args:
        source: where experts come from.
        geometry: of the store behind it.
        program: whose routes are read and whose expert rows are written.
        executor: runs the expert's kernels.
        numerics: name of the kernels' arithmetic.
        by_ops: run the kernels one call per op.
    """

    def __init__(
        self,
        source: ExpertSource,
        geometry: Geometry,
        program: ExpertBuffers,
        executor: Executor,
        *,
        numerics: str,
        by_ops: bool = False,
    ) -> None:
        self._run = executor.run_each if by_ops else executor.run
        self._source = source
        self._elsewhere = source if isinstance(source, RowSource) else None
        self._program = program
        self.experts_chosen = 0
        built: dict[tuple[str, str], ExpertFFN] = {}
        layouts = [
            kernel_layout(layout, geometry.hidden_size, geometry.intermediate_size) for layout in geometry.layouts
        ]
        self._layers: dict[int, tuple[ExpertFFN, ExpertLayout]] = {}
        for entry in geometry.layers:
            layout = layouts[entry.layout]
            if layout.kind not in built:
                built[layout.kind] = ExpertFFN(
                    f"expert ({layout.format})",
                    program.expert_input,
                    program.expert_rows,
                    intermediate=geometry.intermediate_size,
                    format=layout.format,
                    numerics=numerics,
                    quantised=program.expert_quantised,
                    activation=layout.activation,
                )
            self._layers[entry.layer] = (built[layout.kind], layout)

    def run(
        self,
        layer: int,
        rows: int,
        *,
        step: int,
        phase: Phase,
        observe: Callable[[int, NDArray[np.int32], NDArray[np.float32]], None] | None = None,
        meanwhile: Callable[[int, NDArray[np.float32]], None] | None = None,
    ) -> None:
        """Returns when `expert_rows` of all live rows are certain.

        Args:
            layer: model layer with routed experts.
            rows: live rows of the step.
            step: rising number of the step.
            phase: for the source's counters.
            observe: is shown (layer, route indices [rows, top_k], route weights) before any expert is asked for.
            meanwhile: is called while the step waits, with the layer and what the experts that are there already add
                to each row: float32 [rows, H].

        Raises:
            TierdError: whatever the source raises; or it returned without having delivered every expert.
        """
        program = self._program
        indices = program.route_indices[:rows]
        if observe is not None:
            observe(layer, indices, program.route_weights[:rows])
        assignments = assign_routes(indices)
        ffn, layout = self._layers[layer]
        point, assign, run, segment = ffn.point, ffn.assign, self._run, ffn.segment
        used: set[int] = set()

        def use(expert: int, address: int) -> None:
            point(layout, address)
            assign(*assignments[expert])
            run(segment)
            used.add(expert)

        self.experts_chosen += len(assignments)
        wanted = list(assignments)
        if self._elsewhere is not None:
            inputs, outputs = program.expert_input[:rows], program.expert_rows[:rows]
            wanted = list(self._elsewhere.compute(layer, indices, inputs, outputs, step=step, phase=phase))
            used.update(assignments.keys() - set(wanted))
        if meanwhile is None and wanted:
            self._source.visit(layer, wanted, use, step=step, phase=phase)
        elif meanwhile is not None:

            def wait() -> None:
                # Rows of the others hold anything at all, so they must not even be multiplied by 0.
                known = np.zeros((rows, program.expert_rows.shape[2]), np.float32)
                for expert in used:
                    for row, rank in zip(*assignments[expert], strict=True):
                        known[row] += program.route_weights[row, rank] * program.expert_rows[row, rank]
                meanwhile(layer, known)

            self._source.visit(layer, wanted, use, step=step, phase=phase, meanwhile=wait)
        if len(used) != len(assignments):
            lacking = sorted(set(assignments) - used)
            raise TierdError(f"layer {layer}: the expert source did not deliver experts {lacking[:8]}")
