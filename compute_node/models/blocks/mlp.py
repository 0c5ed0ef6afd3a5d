"""SwiGLU blocks that are always computed: dense layers, and experts that every token goes through."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compute_node import kernels
from compute_node.models.decoder import DecoderBuilder

__all__ = ["dense_mlp", "post_attention_norm", "shared_expert", "swiglu"]

F32 = NDArray[np.float32]


def post_attention_norm(build: DecoderBuilder, layer: int) -> F32:
    """`normed` = norm of x; returns the norm's weight."""
    name = f"model.layers.{layer}.post_attention_layernorm"
    label = f"layer {layer} post-attention norm"
    return build.norm(label, name, build.x, build.normed, centred=build.config.centred_norms)


def swiglu(build: DecoderBuilder, label: str, prefix: str, width: int, y: F32) -> None:
    """`y` = down(silu(gate) * up) of `normed`.

    Args:
        build: the program.
        label: beginning of the ops' names.
        prefix: of the tensors `gate_proj`, `up_proj` and `down_proj`.
        width: between them.
        y: float32 [rows, H].
    """
    gate, up = build.buffer("gate", width), build.buffer("up", width)
    build.project(f"{label} gate_proj", f"{prefix}.gate_proj", build.normed, gate)
    build.project(f"{label} up_proj", f"{prefix}.up_proj", build.normed, up)
    build.add(kernels.silu_mul(f"{label} silu", gate, up, gate, build.batch))
    build.written(gate)
    build.project(f"{label} down_proj", f"{prefix}.down_proj", gate, y)


def dense_mlp(build: DecoderBuilder, layer: int) -> None:
    """Adds to x: down(silu(gate) * up) of the normed x."""
    post_attention_norm(build, layer)
    swiglu(build, f"layer {layer}", f"model.layers.{layer}.mlp", build.config.dense_width, build.delta)
    build.add(kernels.add(f"layer {layer} mlp residual", build.x, build.delta, build.batch))


def shared_expert(build: DecoderBuilder, layer: int, *, name: str = "mlp.shared_experts") -> F32:
    """The expert of `config.shared_width` that every token goes through, applied to `normed`: float32 [rows, H]."""
    y = build.buffer("shared", build.config.hidden_size)
    prefix = f"model.layers.{layer}.{name}"
    swiglu(build, f"layer {layer} shared expert", prefix, build.config.shared_width, y)
    return y
