"""Routers of layers to come, applied to the state of this one: which experts will probably be wanted next.

The ops stand apart from the step. They are run while the step waits for experts, on buffers of their own, and change
nothing that a token depends on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compute_node import kernels
from compute_node.kernels import Batch, Matrix, Segment
from compute_node.models.candidate_head import CandidateHead, HeadWeights

__all__ = ["LOOK_AHEAD_ROWS", "LookAhead", "RouterWeights"]

F32 = NDArray[np.float32]

LOOK_AHEAD_ROWS: Final = 4
"""Most rows of a step that is looked ahead of: a prefill wants nearly all experts of a layer anyway."""


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """What decides in a layer.

    Attributes:
        norm: weight of the norm before the router, float32 [H].
        router: [experts, H].
        bias: of the router, float32 [experts], or None.
    """

    norm: F32
    router: Matrix
    bias: F32 | None = None


class LookAhead:
    """Routers by layer, ready to be run on any state.

    Args:
        routers: by model layer.
        residual: float32 [rows, H], the residual stream of the step.
        router_logits: float32 [rows, experts], of the layer where the step stopped.
        eps: of the norms.
        always: float32 [rows, H], what a shared expert gives of the layer where the step stopped; None: there is none.
        head: what makes logits of the last layer's state; None: it is not asked.

    Attributes:
        residual: as given; after a router has run, the state after attention.
        router_logits: as given.
        state: float32 [LOOK_AHEAD_ROWS, H], what `segment` is applied to.
        logits: float32 [LOOK_AHEAD_ROWS, experts], what it gives.
        batch: live rows of the two.
        candidates: the head for a few tokens, on `state`; None where it cannot be asked.
    """

    def __init__(
        self,
        routers: Mapping[int, RouterWeights],
        residual: F32,
        router_logits: F32,
        eps: float,
        always: F32 | None = None,
        head: HeadWeights | None = None,
    ) -> None:
        self.residual = residual
        self._always = always
        self.router_logits = router_logits
        self.batch = Batch(LOOK_AHEAD_ROWS)
        self.state = np.zeros((LOOK_AHEAD_ROWS, residual.shape[1]), np.float32)
        self.logits = np.zeros((LOOK_AHEAD_ROWS, router_logits.shape[1]), np.float32)
        normed = np.zeros_like(self.state)
        self.candidates: CandidateHead | None = None
        if head is not None:
            candidates = CandidateHead(head, eps, self.state, self.batch)
            self.candidates = candidates if candidates.most else None
        self._segments = {
            layer: Segment(
                f"look ahead to layer {layer}",
                [
                    kernels.rms_norm(f"layer {layer} look-ahead norm", self.state, w.norm, eps, normed, self.batch),
                    kernels.matmul(
                        f"layer {layer} look-ahead router", w.router, normed, self.logits, self.batch, bias=w.bias
                    ),
                ],
            )
            for layer, w in routers.items()
        }

    def start_from(self, rows: slice | NDArray[np.intp], known: F32) -> None:
        """Sets `state` to what the layer where the step stopped will leave behind, as far as that is known.

        Args:
            rows: of the step.
            known: float32 [n, H], what those of its routed experts add that are there.
        """
        state = self.state[: len(known)]
        self.batch.set_rows(len(known))
        np.add(self.residual[rows], known, out=state)
        if self._always is not None:
            state += self._always[rows]

    def segment(self, layer: int) -> Segment:
        """Ops that apply the router of a layer to `state`."""
        return self._segments[layer]
