"""How a model is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from compute_node.kernels import NUMERICS
from tierd.errors import UsageError

__all__ = ["DEFAULT_CONTEXT", "EXECUTIONS", "ModelOptions"]

DEFAULT_CONTEXT: Final = 4096

EXECUTIONS: Final = ("fused", "layers", "ops")
"""How a step is run: in one native call where no expert is missing, one call per layer, or one call per op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How a model is run; nothing but the numerics changes a bit of its logits.

    Attributes:
        numerics: `exact`, or `fast`: activations as signed bytes wherever weights are quantised; see `kernels.matmul`.
        execution: one of `EXECUTIONS`; for tests and comparisons.
        context: most tokens of a sequence; None: what the checkpoint was made for, at most `DEFAULT_CONTEXT`.
        sequences: how many sequences have a place in the KV cache.
        kv_cache: most bytes of the KV cache; None: what `sequences` full contexts take, at most a quarter of RAM.
        threads: native threads; None: the cores that this process may use.
        rows: most tokens of one step; longer prompts are computed in chunks of this size.
        head_rows: most rows whose logits are computed together.
        prefetch: tell the daemon what will probably be wanted: one of `step_hints.PREFETCH`.
    """

    numerics: str = "exact"
    execution: str = "fused"
    context: int | None = None
    sequences: int = 1
    kv_cache: int | None = None
    threads: int | None = None
    rows: int = 64
    head_rows: int = 8
    prefetch: str = "off"

    def context_of(self, most: int) -> int:
        """Most tokens of a sequence of a checkpoint that was made for so many.

        Raises:
            UsageError: here or elsewhere an option is outside its limits.
        """
        context = min(most, DEFAULT_CONTEXT) if self.context is None else self.context
        if not 1 <= context <= most:
            raise UsageError(f"--context {context} is outside 1 to {most}, the context of this checkpoint")
        if min(self.rows, self.head_rows) < 1:
            raise UsageError("a step has at least one row")
        if self.numerics not in NUMERICS:
            raise UsageError(f"unknown numerics {self.numerics!r}", hint=f"Known: {', '.join(NUMERICS)}.")
        if self.execution not in EXECUTIONS:
            raise UsageError(f"unknown execution {self.execution!r}", hint=f"Known: {', '.join(EXECUTIONS)}.")
        return context
