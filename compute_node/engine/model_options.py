"""How a model is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
