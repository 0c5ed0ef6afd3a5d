"""Which rows of a step go through the LM head, and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.executor import Executor
from compute_node.models.decoder_program import DecoderProgram

__all__ = ["HeadRows"]


class HeadRows:
    """Chooses rows before a step and reads their logits after it.

    Args:
        program: whose head it is.
        executor: runs the head again, for rows that did not fit the step's own run of it.
    """

    __slots__ = ("_executor", "_program")

    def __init__(self, program: DecoderProgram, executor: Executor) -> None:
        self._program = program
        self._executor = executor

    def choose(self, rows: Sequence[int]) -> None:
        """Makes the first of these the rows that go through the head, as many as it takes."""
        program = self._program
        count = min(len(rows), program.head_batch.max_rows)
        program.head_index[:count] = rows[:count]
        program.head_batch.set_rows(count)

    def logits(self, rows: Sequence[int]) -> tuple[NDArray[np.float32], list[int]]:
        """Logits of the chosen rows, float32 [rows, vocabulary], until the next step; and the likeliest token of each.

        Those that did not fit the step's own run of the head are computed now.
        """
        program, count = self._program, len(rows)
        most = program.head_batch.max_rows
        likeliest: list[int] = program.likeliest[: min(count, most)].tolist()
        if count <= most:
            return program.logits[:count], likeliest
        logits = np.empty((count, program.logits.shape[1]), np.float32)
        logits[:most] = program.logits
        for first in range(most, count, most):
            part = min(most, count - first)
            self.choose(rows[first:])
            self._executor.run(program.head)
            logits[first : first + part] = program.logits[:part]
            likeliest += program.likeliest[:part].tolist()
        return logits, likeliest
