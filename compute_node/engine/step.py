"""Runs a step: as one native program where experts can be read directly, else segment by segment.

The fused program is all segments in one table, with the ops of `kernels.expert_group` where they meet. It comes back
for a layer whose experts are not all resident, and goes on behind it. Either way gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from compute_node.engine.executor import Executor
from compute_node.engine.expert_step import kernel_layout
from compute_node.engine.kv_cache import Sequence
from compute_node.engine.model_options import ModelOptions
from compute_node.engine.program import Segment
from compute_node.kernels import Binding, ExpertGroup, ExpertLayout, ExpertShape, Op
from compute_node.kernels.expert_group import CANCEL, STEP
from compute_node.kernels.pages import PAGE
from compute_node.models.decoder_program import DecoderProgram
from tierd.client.source import DirectAccess, ExpertSource, Phase
from tierd.store.geometry import Geometry

__all__ = ["FUSED_PROMPT_ROWS", "FUSED_ROWS", "StepRunner"]

FUSED_ROWS: Final = 64
"""Most rows of a fused step that decodes."""
FUSED_PROMPT_ROWS: Final = 16
"""The same of a prefill from which something can be learned: Python sees the routes of layers that it brings."""


_NOWHERE: Final = object()


class StepRunner:
    """Runs the segments of a program and says at which layers Python has to bring experts.

    Args:
        source: where experts come from.
        geometry: of the store behind it.
        program: to run.
        executor: runs it.
        options: whose numerics and execution count; `fused`, `layers`: one call per segment, `ops`: one per op.
        recurrent: sequences have states.
    """

    def __init__(
        self,
        source: ExpertSource,
        geometry: Geometry,
        program: DecoderProgram,
        executor: Executor,
        options: ModelOptions,
        *,
        recurrent: bool,
    ) -> None:
        self._source = source
        self._program = program
        self._executor = executor
        self._fuses = options.execution == "fused"
        self._by_ops = options.execution == "ops"
        self._binding = Binding()
        self._direct: DirectAccess | object = _NOWHERE
        self._bound_phase: Phase | None = None
        # Views that write single elements with a fraction of numpy's code.
        self._words = self._binding.words.data
        self._row, self._rows_cell = program.batch.first_row, program.batch.count.data
        self._head_rows_cell, self._head_cell = program.head_batch.count.data, program.head_index.data
        self._starts: list[int] = []
        self._groups: list[int] = []  # where the ops of each layer's experts begin
        self._halts: dict[int, int] = {}
        self._rows = min(FUSED_ROWS, program.batch.max_rows)
        self._prompt_rows = min(FUSED_PROMPT_ROWS, self._rows)
        self._native, self._position = False, 0
        self._step, self._phase, self._cancel = 0, Phase.DECODE, 0
        self._passing: Callable[[int], object] | None = None
        source.stats.count_direct(self._binding)
        ops: list[Op] = []
        groups: dict[tuple[str, str], ExpertGroup] = {}
        most = max((entry.experts for entry in geometry.layers), default=1)
        entries = {entry.layer: entry for entry in geometry.layers}
        for position, (segment, layer) in enumerate(zip(program.body, program.expert_layers, strict=False)):
            self._starts.append(len(ops))
            ops += segment.ops
            self._groups.append(len(ops))
            entry = entries[layer]
            layout = kernel_layout(geometry.layouts[entry.layout], geometry.hidden_size, geometry.intermediate_size)
            if layout.kind not in groups:
                groups[layout.kind] = self._group(layout, geometry, options.numerics, most)
            added = groups[layout.kind].ops(
                f"layer {layer}", layout, start=geometry.layer_start(layer), experts=entry.experts
            )
            for number, op in enumerate(added):
                if op.halt is not None:
                    self._halts[len(ops) + number] = position
            ops += added
        self._starts.append(len(ops))
        ops += program.body[-1].ops
        ops += program.head.ops
        self.segment = Segment("step", ops)
        self._ops = len(ops)
        self._recurrent = recurrent

    @property
    def experts_used(self) -> int:
        """Experts that the native step used by itself, over all steps."""
        return self._binding.used

    def begin(
        self,
        rows: int,
        *,
        step: int,
        phase: Phase,
        observed: bool,
        cancel: int = 0,
        passing: Callable[[int], object] | None = None,
    ) -> None:
        """A step begins; `run` computes it. The batch, and the head's batch and index, are set before.

        Args:
            rows: live rows.
            step: rising number of the step.
            phase: for the counters.
            observed: the caller wants to see every layer.
            cancel: address of an int64 that ends a native run at the next layer while it is not 0; 0: there is none.
            passing: called with each layer that native code reaches, when the router has chosen and before anything is
                done with its experts; None: native code does not come back for that.
        """
        most = self._prompt_rows if phase is Phase.PREFILL else self._rows
        self._native = self._fuses and not observed and rows <= most
        self._position = 0
        self._step, self._phase, self._cancel, self._passing = step, phase, cancel, passing

    def run_unseen(self, rows: int, step: int, phase: Phase, cancel: int) -> int | None:
        """`begin` and `run` of a step that nobody looks into: its prompts need not be seen layer by layer either."""
        if not self._fuses or rows > self._rows or not self._bind(phase):
            self.begin(rows, step=step, phase=phase, observed=False, cancel=cancel)
            return self.run()
        self._binding.set_step(step, cancel)
        return self._left(self._executor.run(self.segment), step, phase, cancel)

    def run_one(
        self, token: int, position: int, sequence: Sequence, step: int, phase: Phase, cancel: int
    ) -> int | None:
        """`run_unseen` of one row, which it makes the live one, and the one whose logits are wanted."""
        cells = self._row
        cells[0], cells[1], cells[2], cells[3] = token, position, sequence.address, sequence.pages * PAGE
        if self._recurrent:
            cells[4], cells[5] = sequence.state_in, sequence.state_out
        self._rows_cell[0], self._head_rows_cell[0], self._head_cell[0] = 1, 1, 0
        if not self._fuses or self._source.direct is not self._direct or phase is not self._bound_phase:
            return self.run_unseen(1, step, phase, cancel)
        words = self._words
        words[STEP], words[CANCEL] = step, cancel
        done = self._executor.run(self.segment)
        return None if done == self._ops else self._left(done, step, phase, cancel)

    def _left(self, done: int, step: int, phase: Phase, cancel: int) -> int | None:
        """What is left of a step that native code ran up to this op: the layer that lacks experts, if any."""
        if done == self._ops:
            return None
        position = self._halts[done]
        self._native, self._position, self._passing = True, position + 1, None
        self._step, self._phase, self._cancel = step, phase, cancel
        return self._program.expert_layers[position]

    def run(self) -> int | None:
        """Runs on to the next layer whose experts the caller has to bring before it calls again; None at the end."""
        program, position = self._program, self._position
        if self._native and self._bind(self._phase):
            self._binding.set_step(self._step, self._cancel)
            done = self._run_native(position)
            if done == self._ops:
                return None
            position = self._halts[done]
        else:
            self._run(program.body[position])
            if position == len(program.expert_layers):
                self._run(program.head)
                return None
        self._position = position + 1
        return program.expert_layers[position]

    def _run_native(self, position: int) -> int:
        """Runs on from a layer, by its position; the number of the op that halted, or at the end how many there are."""
        begin = self._starts[position]
        if self._passing is not None:
            for pause in range(position, len(self._groups)):
                until = self._groups[pause]
                done = self._executor.run(self.segment, begin, until)
                if done != until:
                    return done
                self._passing(self._program.expert_layers[pause])
                begin = until
        return self._executor.run(self.segment, begin)

    def _group(self, layout: ExpertLayout, geometry: Geometry, numerics: str, experts: int) -> ExpertGroup:
        program = self._program
        shape = ExpertShape(
            f"experts ({layout.format})",
            program.expert_input,
            program.expert_rows,
            geometry.intermediate_size,
            layout.format,
            numerics,
            program.expert_quantised,
            layout.activation,
        )
        return ExpertGroup(
            shape, program.route_indices, program.batch, self._binding, rows=self._rows, experts=experts
        )  # fmt: skip

    def _run(self, segment: Segment) -> None:
        if self._by_ops:
            self._executor.run_each(segment)
        else:
            self._executor.run(segment)

    def _bind(self, phase: Phase) -> bool:
        """Points native code at the residents; False if Python has to bring all."""
        direct = self._source.direct
        if direct is None:
            return False
        if direct is not self._direct or phase is not self._bound_phase:
            self._binding.point(
                table=direct.table,
                payload=direct.payload,
                slot_bytes=direct.slot_bytes,
                last_step=direct.last_step,
                uses=direct.prefill_uses if phase is Phase.PREFILL else direct.decode_uses,
                step_word=direct.step,
                in_use=direct.in_use,
            )
            self._direct, self._bound_phase = direct, phase
        return True
