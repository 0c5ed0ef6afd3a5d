"""Gated DeltaNet as a block: linear attention with a recurrent state instead of a cache of keys and values.

Source: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464; modeling_qwen3_next.py of transformers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compute_node import kernels
from compute_node.kernels.causal_conv import causal_conv
from compute_node.kernels.delta_net import delta_gates, delta_rule, l2_norm
from compute_node.models.blocks.attention import input_norm
from compute_node.models.decoder import DecoderBuilder
from compute_node.models.delta_net_sizes import DeltaNetSizes

__all__ = ["delta_net"]

F32 = NDArray[np.float32]

_L2_EPS = 1e-6
"""Added to the sum of squares of queries and keys; not a setting of the published configs."""


def delta_net(build: DecoderBuilder, layer: int) -> None:
    """Adds to x: out_proj(norm(delta rule(l2(q), l2(k), v)) * silu(z)) of the normed x."""
    sizes, batch, label = build.config.delta_net, build.batch, f"layer {layer}"
    assert sizes is not None, "the family's config has the sizes of its linear layers"
    prefix = f"model.layers.{layer}.linear_attn"
    input_norm(build, layer)
    mixed, z = build.buffer("mixed", sizes.channels), build.buffer("delta gate", sizes.values)
    rates = build.buffer("rates", 2 * sizes.value_heads)
    if sizes.fused:
        _fused_projections(build, f"{label} delta-net", prefix, sizes, (mixed, z, rates))
    else:
        for name, y in (("qkv", mixed), ("z", z), ("b", _left(rates)), ("a", _right(rates))):
            build.project(f"{label} in_proj_{name}", f"{prefix}.in_proj_{name}", build.normed, y)
    convolved = build.buffer("convolved", sizes.channels)
    taps = build.weights.array(f"{prefix}.conv1d.weight", (sizes.channels, 1, sizes.taps))[:, 0]
    query, key, value = np.split(convolved, [sizes.keys, 2 * sizes.keys], axis=1)
    decay, beta = build.buffer("decay", sizes.value_heads), build.buffer("beta", sizes.value_heads)
    out = build.buffer("delta values", sizes.values)
    width, scale = sizes.key_width, sizes.key_width**-0.5
    build.add(
        causal_conv(f"{label} convolution", mixed, taps, build.cache.state(f"{label} convolution"), convolved, batch),
        l2_norm(f"{label} query l2", query, query, batch, width=width, scale=scale, eps=_L2_EPS),
        l2_norm(f"{label} key l2", key, key, batch, width=width, eps=_L2_EPS),
        delta_gates(
            f"{label} rates",
            _right(rates),
            _left(rates),
            build.vector(f"{prefix}.A_log", sizes.value_heads),
            build.vector(f"{prefix}.dt_bias", sizes.value_heads),
            decay,
            beta,
            batch,
        ),
        delta_rule(
            f"{label} delta rule", query, key, value, decay, beta, build.cache.state(f"{label} delta"), out, batch
        ),
    )
    build.norm(f"{label} delta norm", f"{prefix}.norm", out, out, width=sizes.value_width)
    build.add(kernels.silu_mul(f"{label} delta gate", z, out, out, batch))
    build.written(out)
    build.project(f"{label} out_proj", f"{prefix}.out_proj", out, build.delta)
    build.add(kernels.add(f"{label} delta-net residual", build.x, build.delta, batch))


def _left(rates: F32) -> F32:
    """The b of all heads."""
    return rates[:, : rates.shape[1] // 2]


def _right(rates: F32) -> F32:
    """The a of all heads."""
    return rates[:, rates.shape[1] // 2 :]


def _fused_projections(
    build: DecoderBuilder, label: str, prefix: str, sizes: DeltaNetSizes, outputs: tuple[F32, F32, F32]
) -> None:
    """The same outputs from projections that are sorted by key heads, whose rows are put in order once."""
    mixed, z, rates = outputs
    hidden = build.config.hidden_size
    values, gates = build.weights.parts(
        f"{prefix}.in_proj_qkvz.weight", sizes.channels + sizes.values, hidden, sizes.fused_order()
    )
    (both,) = build.weights.parts(
        f"{prefix}.in_proj_ba.weight", 2 * sizes.value_heads, hidden, (sizes.fused_rates_order(),)
    )
    for name, matrix, y in (("qkv", values, mixed), ("z", gates, z), ("ba", both, rates)):
        build.matmul(f"{label} in_proj {name}", matrix, build.normed, y)
