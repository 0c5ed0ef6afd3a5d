"""Blocks whose result passes a sigmoid gate: attention with one gate per element, a shared expert with one per row.

Source: Qiu et al. 2025, arXiv:2505.06708; modeling_qwen3_next.py of transformers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compute_node.kernels.gates import sigmoid_mul
from compute_node.models.blocks.attention import (
    Heads,
    QueryKeyNorm,
    attend,
    attention_output,
    input_norm,
    query_key_norm,
    rotate_heads,
)
from compute_node.models.blocks.mlp import shared_expert
from compute_node.models.decoder import DecoderBuilder

__all__ = ["gated_attention", "gated_shared_expert"]

F32 = NDArray[np.float32]


def gated_attention(build: DecoderBuilder, layer: int) -> None:
    """Adds to x: o_proj(attention(q, k, v) * sigmoid(gate)) of the normed x; q_proj has each head's query, then gate.

    Queries and keys are normalised per head before they are turned; those norms store their weight as the layer norms.
    """
    config, label, prefix = build.config, f"layer {layer}", f"model.layers.{layer}.self_attn"
    width, hidden, bias = config.heads * config.head_dim, config.hidden_size, config.attention_bias
    input_norm(build, layer)
    heads = Heads(
        build.buffer("query", width),
        build.buffer("key", config.kv_heads * config.head_dim),
        build.buffer("value", config.kv_heads * config.head_dim),
    )
    gate = build.buffer("attention gate", width)
    rows = np.arange(2 * width).reshape(config.heads, 2, config.head_dim)
    orders = (rows[:, 0].ravel(), rows[:, 1].ravel())
    matrices = build.weights.parts(f"{prefix}.q_proj.weight", 2 * width, hidden, orders)
    biases = build.vector(f"{prefix}.q_proj.bias", 2 * width) if bias else None
    for name, matrix, order, y in zip(("query", "gate"), matrices, orders, (heads.query, gate), strict=True):
        own = None if biases is None else biases[order]
        build.matmul(f"{label} q_proj {name}", matrix, build.normed, y, bias=own)
    for name, y in (("k_proj", heads.key), ("v_proj", heads.value)):
        build.project(f"{label} {name}", f"{prefix}.{name}", build.normed, y, bias=bias)
    query_key_norm(build, layer, heads, QueryKeyNorm.PER_HEAD, centred=config.centred_norms)
    rotate_heads(build, layer, heads)
    attended = attend(build, layer, heads, window=None)
    build.add(sigmoid_mul(f"{label} attention gate", attended, gate, attended, build.batch))
    build.written(attended)
    attention_output(build, layer, attended, bias=bias)


def gated_shared_expert(build: DecoderBuilder, layer: int) -> F32:
    """The expert that every token goes through, times the sigmoid of one number per row: float32 [rows, H]."""
    label, prefix = f"layer {layer} shared expert", f"model.layers.{layer}.mlp"
    y = shared_expert(build, layer, name="mlp.shared_expert")
    gate = build.buffer("shared gate", 1)
    build.project(f"{label} gate", f"{prefix}.shared_expert_gate", build.normed, gate)
    build.add(sigmoid_mul(f"{label} gated", y, gate, y, build.batch))
    return y
