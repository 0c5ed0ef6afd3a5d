"""Grouped-query attention as a block, and its parts for families that do something between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from compute_node import kernels
from compute_node.models.decoder import DecoderBuilder
from compute_node.models.rope_settings import RopeSettings

__all__ = [
    "Heads",
    "QueryKeyNorm",
    "attend",
    "attention_output",
    "clip_heads",
    "grouped_attention",
    "input_norm",
    "project_heads",
    "query_key_norm",
    "rotate_heads",
]

F32 = NDArray[np.float32]


class QueryKeyNorm(Enum):
    """What is normalised between the query and key projections and the rotary embedding."""

    NONE = "none"
    FULL_WIDTH = "full width"
    PER_HEAD = "per head"


@dataclass(frozen=True, slots=True)
class Heads:
    """The step's queries, keys and values.

    Attributes:
        query: float32 [rows, heads * head_dim].
        key: float32 [rows, kv_heads * head_dim].
        value: the same.
    """

    query: F32
    key: F32
    value: F32


def input_norm(build: DecoderBuilder, layer: int) -> None:
    """`normed` = norm of x."""
    name = f"model.layers.{layer}.input_layernorm"
    build.norm(f"layer {layer} input norm", name, build.x, build.normed, centred=build.config.centred_norms)


def project_heads(build: DecoderBuilder, layer: int, *, bias: bool) -> Heads:
    """Queries, keys and values of `normed`, by q_proj, k_proj and v_proj."""
    config = build.config
    heads = Heads(
        build.buffer("query", config.heads * config.head_dim),
        build.buffer("key", config.kv_heads * config.head_dim),
        build.buffer("value", config.kv_heads * config.head_dim),
    )
    for name, y in (("q_proj", heads.query), ("k_proj", heads.key), ("v_proj", heads.value)):
        build.project(f"layer {layer} {name}", f"model.layers.{layer}.self_attn.{name}", build.normed, y, bias=bias)
    return heads


def query_key_norm(
    build: DecoderBuilder, layer: int, heads: Heads, kind: QueryKeyNorm, *, centred: bool = False
) -> None:
    """Normalises queries and keys in place, over a head or over the whole row."""
    if kind is QueryKeyNorm.NONE:
        return
    for name, y in (("q_norm", heads.query), ("k_norm", heads.key)):
        width = None if kind is QueryKeyNorm.FULL_WIDTH else build.config.head_dim
        weight = f"model.layers.{layer}.self_attn.{name}"
        build.norm(f"layer {layer} {name}", weight, y, y, width=width, centred=centred)


def clip_heads(build: DecoderBuilder, layer: int, heads: Heads, limit: float) -> None:
    """Clamps queries, keys and values to plus or minus `limit` in place."""
    for name, y in (("q", heads.query), ("k", heads.key), ("v", heads.value)):
        build.add(kernels.clip(f"layer {layer} clip {name}", y, limit, build.batch))


def rotate_heads(build: DecoderBuilder, layer: int, heads: Heads, rope: RopeSettings | None = None) -> None:
    """Turns queries and keys in place by their rows' positions, as the config says or with other settings."""
    settings = rope or build.config.rope
    cos, sin = build.rope_tables(settings)
    for name, y in (("q", heads.query), ("k", heads.key)):
        build.add(
            kernels.rope(
                f"layer {layer} rope {name}",
                y,
                cos,
                sin,
                build.batch,
                head_dim=build.config.head_dim,
                interleaved=settings.interleaved,
            )
        )


def attend(
    build: DecoderBuilder,
    layer: int,
    heads: Heads,
    *,
    window: int | None,
    scale: float | None = None,
    sinks: F32 | None = None,
) -> F32:
    """Stores keys and values, and lets the queries look at the sequence so far.

    Args:
        build: the program.
        layer: model layer.
        heads: of the step.
        window: positions that a row sees, its own included; None: all.
        scale: of the scores; None: head_dim ** -0.5.
        sinks: float32 [heads], scores without a value that take part in each head's softmax; None: none.

    Returns:
        float32 [rows, heads * head_dim].
    """
    config, label = build.config, f"layer {layer}"
    attended = build.buffer("attended", config.heads * config.head_dim)
    keys, values = build.cache.plane(f"{label} keys"), build.cache.plane(f"{label} values")
    build.add(
        kernels.kv_append(f"{label} cache", heads.key, heads.value, keys, values, build.batch),
        kernels.attention(
            f"{label} attention",
            heads.query,
            keys,
            values,
            attended,
            build.batch,
            scale=config.head_dim**-0.5 if scale is None else scale,
            window=window,
            sinks=sinks,
        ),
    )
    build.written(attended)
    return attended


def attention_output(build: DecoderBuilder, layer: int, attended: F32, *, bias: bool) -> None:
    """Adds o_proj(attended) to x."""
    name = f"model.layers.{layer}.self_attn.o_proj"
    build.project(f"layer {layer} o_proj", name, attended, build.delta, bias=bias)
    build.add(kernels.add(f"layer {layer} attention residual", build.x, build.delta, build.batch))


def grouped_attention(
    build: DecoderBuilder, layer: int, *, norm: QueryKeyNorm, output_bias: bool | None = None
) -> None:
    """Adds to x: o_proj(attention(rope(norm(q)), rope(norm(k)), v)) of the normed x.

    Args:
        build: the program.
        layer: model layer.
        norm: of queries and keys.
        output_bias: whether o_proj has a bias; None: as q, k and v.
    """
    config = build.config
    input_norm(build, layer)
    heads = project_heads(build, layer, bias=config.attention_bias)
    query_key_norm(build, layer, heads, norm)
    if config.clip_qkv is not None:
        clip_heads(build, layer, heads, config.clip_qkv)
    rotate_heads(build, layer, heads)
    attended = attend(build, layer, heads, window=config.window)
    attention_output(build, layer, attended, bias=config.attention_bias if output_bias is None else output_bias)
