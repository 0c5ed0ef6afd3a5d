"""Routed experts as a block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from compute_node import kernels
from compute_node.models.blocks.mlp import post_attention_norm
from compute_node.models.decoder import DecoderBuilder
from compute_node.models.look_ahead import RouterWeights

__all__ = ["routed_experts"]

F32 = NDArray[np.float32]


def routed_experts(
    build: DecoderBuilder,
    layer: int,
    *,
    router: str,
    bias: str | None = None,
    correction: str | None = None,
    shared: Callable[[DecoderBuilder, int], F32] | None = None,
) -> None:
    """Adds to x the sum, in router order, of weight times expert, then the shared expert if there is one.

    The segment ends between router and sum. What the shared expert gives is computed before, since it needs no drive.

    Args:
        build: the program.
        layer: model layer.
        router: name of the router's weight, [experts, H].
        bias: name of its bias [experts], None: it has none.
        correction: name of the vector [experts] that is added to the scores for the choice alone, None: there is none.
        shared: appends the ops of an expert that every token goes through, and returns its result [rows, H].
    """
    config = build.config
    norm = post_attention_norm(build, layer)
    matrix = build.weights.matrix(router, config.experts, config.hidden_size)
    router_bias = None if bias is None else build.vector(bias, config.experts)
    added = None if correction is None else build.vector(correction, config.experts)
    build.route(layer, RouterWeights(norm, matrix, router_bias), correction=added)
    always = build.always = None if shared is None else shared(build, layer)
    build.experts(layer)
    if always is not None:
        build.add(kernels.add(f"layer {layer} shared expert residual", build.x, always, build.batch))
