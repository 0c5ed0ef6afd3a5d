"""The indexer of sparse attention as a block: which positions the rows of a step read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compute_node import kernels
from compute_node.kernels.indexer import choose_positions, index_scores
from compute_node.kernels.latent_attention import plane_append
from compute_node.kernels.layer_norm import layer_norm
from compute_node.models.decoder import DecoderBuilder

__all__ = ["chosen_positions"]

F32 = NDArray[np.float32]


def chosen_positions(build: DecoderBuilder, layer: int, compressed: F32) -> NDArray[np.int32]:
    """The positions that each row reads in this layer.

    Args:
        build: the program.
        layer: model layer; a shared one takes over what the nearest lower layer with an indexer chose.
        compressed: float32 [rows, query_rank], the normed compressed query.

    Returns:
        int32 [rows, 1 + positions]: how many, then which, rising.
    """
    config, label = build.config, f"layer {layer} indexer"
    indexer, latent = config.indexer, config.latent
    assert indexer is not None
    assert latent is not None
    context = build.cache.context
    chosen = build.integers("chosen positions", 1 + min(indexer.top_k, context))
    if layer in indexer.shared_layers:
        return chosen
    prefix = f"model.layers.{layer}.self_attn.indexer"
    query = build.buffer("index query", indexer.heads * indexer.head_dim)
    key = build.buffer("index key", indexer.head_dim)
    weights = build.buffer("index weights", indexer.heads)
    scores = build.buffer("index scores", context)
    build.project(f"{label} wq_b", f"{prefix}.wq_b", compressed, query)
    build.project(f"{label} wk", f"{prefix}.wk", build.normed, key)
    build.project(f"{label} weights", f"{prefix}.weights_proj", build.normed, weights)
    norm = build.vector(f"{prefix}.k_norm.weight", indexer.head_dim)
    shift = build.vector(f"{prefix}.k_norm.bias", indexer.head_dim)
    build.add(layer_norm(f"{label} k norm", key, norm, shift, indexer.norm_eps, key, build.batch))
    cos, sin = build.rope_tables(config.rope)
    for name, y in (("q", query), ("k", key)):
        build.add(
            kernels.rope(
                f"{label} rope {name}",
                y,
                cos,
                sin,
                build.batch,
                head_dim=indexer.head_dim,
                interleaved=indexer.interleaved,
            )
        )
    plane = build.cache.plane(f"layer {layer} index keys")
    build.add(
        plane_append(f"{label} cache", key, plane, build.batch),
        index_scores(
            f"{label} scores",
            query,
            weights,
            plane,
            scores,
            build.batch,
            most=chosen.shape[1] - 1,
            scale=indexer.head_dim**-0.5,
            weight_scale=indexer.heads**-0.5,
        ),
        choose_positions(f"{label} top-k", scores, chosen, build.batch),
    )
    return chosen
