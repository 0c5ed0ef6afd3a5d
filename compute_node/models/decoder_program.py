"""A decoder step that is ready to run, and the buffers through which the engine talks to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compute_node.kernels import Batch, QuantisedRows, Segment
from compute_node.models.look_ahead import LookAhead

__all__ = ["DecoderProgram"]

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DecoderProgram:
    """The ops of a step, and what they read and leave behind.

    Attributes:
        batch: live rows of a step.
        body: segments; after segment i the engine brings the experts of `expert_layers[i]`. One more than those.
        expert_layers: model layers with routed experts, rising.
        head: final norm, LM head and the likeliest token over the rows that `head_index` names.
        head_batch: its live rows.
        head_index: int64 [head rows], rows of the step whose logits are wanted.
        logits: float32 [head rows, vocabulary].
        likeliest: int64 [head rows], the token with the largest logit, the lowest of equals; -1 if one is not finite.
        expert_input: float32 [rows, H], what the experts of the current layer are applied to.
        expert_quantised: the same as signed bytes, where experts want it.
        expert_rows: float32 [rows, top_k, H], one row per token and router rank.
        route_indices: int32 [rows, top_k], experts in router order.
        route_weights: float32 [rows, top_k].
        look_ahead: routers of layers to come, to be applied to the state of this one.
    """

    batch: Batch
    body: tuple[Segment, ...]
    expert_layers: tuple[int, ...]
    head: Segment
    head_batch: Batch
    head_index: NDArray[np.int64]
    logits: F32
    likeliest: NDArray[np.int64]
    expert_input: F32
    expert_quantised: QuantisedRows | None
    expert_rows: F32
    route_indices: NDArray[np.int32]
    route_weights: F32
    look_ahead: LookAhead
