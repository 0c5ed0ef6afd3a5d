"""Multi-head latent attention as a block: one latent per token in the cache, queries and values brought to it.

The published `kv_b_proj` expands a latent to the keys and values of all heads. It is taken apart when a model is
loaded: its key rows, turned, are applied to the queries, its value rows to the attended latents. float32, bf16 and int8
weights stay as they are, other formats become float32, which changes no value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compute_node import kernels
from compute_node.engine.cache_layout import CacheLayout, Plane
from compute_node.kernels.latent_attention import latent_attention as latent_attention_op
from compute_node.kernels.latent_attention import plane_append
from compute_node.kernels.per_head import copy_heads, head_matmul, scale_heads
from compute_node.models.blocks.attention import attention_output, input_norm
from compute_node.models.blocks.indexer import chosen_positions
from compute_node.models.decoder import DecoderBuilder
from compute_node.models.decoder_config import DecoderConfig
from compute_node.models.latent_settings import LatentSettings

__all__ = ["latent_attention", "latent_layout"]

F32 = NDArray[np.float32]


def latent_layout(config: DecoderConfig) -> CacheLayout:
    """A latent of every layer, and the indexer's key of the layers that have one."""
    latent, indexer = config.latent, config.indexer
    assert latent is not None
    planes = {f"layer {layer} latent": Plane(1, latent.width) for layer in range(config.layers)}
    if indexer is not None:
        own = (layer for layer in range(config.layers) if layer not in indexer.shared_layers)
        planes |= {f"layer {layer} index keys": Plane(1, indexer.head_dim) for layer in own}
    return CacheLayout(planes)


def latent_attention(build: DecoderBuilder, layer: int) -> None:
    """Adds to x: o_proj of the attention of the normed x over the latents so far, or over those the indexer chose."""
    config, label = build.config, f"layer {layer}"
    latent, prefix = config.latent, f"model.layers.{layer}.self_attn"
    assert latent is not None
    input_norm(build, layer)
    query, compressed = _queries(build, layer, latent)
    _append_latent(build, layer, latent)
    parts = _split_matrix(build, f"{prefix}.kv_b_proj.weight", latent)
    if parts.key_scales is not None:
        build.add(scale_heads(f"{label} scales of keys", query, parts.key_scales, build.batch))
    absorbed = build.buffer("absorbed queries", config.heads * latent.width)
    build.add(
        head_matmul(f"{label} queries to latents", parts.keys, query, absorbed, build.batch),
        copy_heads(
            f"{label} rotary queries",
            query,
            absorbed,
            build.batch,
            heads=config.heads,
            source=latent.plain,
            target=latent.rank,
            width=latent.rotary,
        ),
    )
    chosen = None if config.indexer is None else chosen_positions(build, layer, compressed)
    latents = build.buffer("attended latents", config.heads * latent.rank)
    attended = build.buffer("attended", config.heads * latent.value)
    build.add(
        latent_attention_op(
            f"{label} attention",
            absorbed,
            build.cache.plane(f"{label} latent"),
            latents,
            build.batch,
            rank=latent.rank,
            scale=latent.scale,
            chosen=chosen,
        ),
        head_matmul(
            f"{label} latents to values", parts.values, latents, attended, build.batch, scales=parts.value_scales
        ),
    )
    build.written(attended)
    attention_output(build, layer, attended, bias=config.attention_bias)


def _queries(build: DecoderBuilder, layer: int, latent: LatentSettings) -> tuple[F32, F32]:
    """Queries with their rotary part turned, and the normed compressed query that they and the indexer are made of."""
    config, label, prefix = build.config, f"layer {layer}", f"model.layers.{layer}.self_attn"
    head_dim = latent.plain + latent.rotary
    query, compressed = build.buffer("query", config.heads * head_dim), build.normed
    if latent.query_rank is None:
        build.project(f"{label} q_proj", f"{prefix}.q_proj", build.normed, query)
    else:
        compressed, name = build.buffer("compressed query", latent.query_rank), f"{prefix}.q_a_proj"
        build.project(f"{label} q_a_proj", name, build.normed, compressed, bias=config.attention_bias)
        name = f"{prefix}.q_a_layernorm"
        build.norm(f"{label} q_a norm", name, compressed, compressed, eps=latent.norm_eps)
        build.project(f"{label} q_b_proj", f"{prefix}.q_b_proj", compressed, query)
    _rotate(build, f"{label} rope q", query, head_dim=head_dim, start=latent.plain)
    return query, compressed


def _append_latent(build: DecoderBuilder, layer: int, latent: LatentSettings) -> None:
    """Puts the normed latents of the step, and the rotary key behind each, into the cache."""
    config, label, prefix = build.config, f"layer {layer}", f"model.layers.{layer}.self_attn"
    row = build.buffer("latent", latent.width)
    name = f"{prefix}.kv_a_proj_with_mqa"
    build.project(f"{label} kv_a_proj", name, build.normed, row, bias=config.attention_bias)
    front = row[:, : latent.rank]
    build.norm(f"{label} kv_a norm", f"{prefix}.kv_a_layernorm", front, front, eps=latent.norm_eps)
    _rotate(build, f"{label} rope k", row[:, latent.rank :], head_dim=latent.rotary, start=0)
    build.add(plane_append(f"{label} cache", row, build.cache.plane(f"{label} latent"), build.batch))


def _rotate(build: DecoderBuilder, label: str, x: F32, *, head_dim: int, start: int) -> None:
    rope = build.config.rope
    cos, sin = build.rope_tables(rope)
    build.add(
        kernels.rope(label, x, cos, sin, build.batch, head_dim=head_dim, start=start, interleaved=rope.interleaved)
    )


@dataclass(frozen=True, slots=True)
class _Expansion:
    """The two parts of `kv_b_proj`; scales where they are int8 codes.

    Attributes:
        keys: [heads, rank, plain], brings a head's query to the latents.
        key_scales: float32 [heads, plain], of the query's elements, or None.
        values: [heads, value, rank], makes values of latents.
        value_scales: float32 [heads, value], of the values, or None.
    """

    keys: NDArray[Any]
    key_scales: F32 | None
    values: NDArray[Any]
    value_scales: F32 | None


def _split_matrix(build: DecoderBuilder, name: str, latent: LatentSettings) -> _Expansion:
    heads, rows = build.config.heads, latent.plain + latent.value
    matrix = build.weights.matrix(name, heads * rows, latent.rank)
    data = matrix.data if matrix.format in {"f32", "bf16", "int8"} else kernels.dequantise(matrix)
    parts = data.reshape(heads, rows, latent.rank)
    keys = np.ascontiguousarray(parts[:, : latent.plain].transpose(0, 2, 1))
    values = np.ascontiguousarray(parts[:, latent.plain :])
    if matrix.format != "int8" or matrix.scales is None:
        return _Expansion(keys, None, values, None)
    scales = matrix.scales.reshape(heads, rows)
    own = (np.ascontiguousarray(part) for part in (scales[:, : latent.plain], scales[:, latent.plain :]))
    return _Expansion(keys, next(own), values, next(own))
