"""Qwen3-MoE (Qwen/Qwen3-30B-A3B): some layers may be dense; query and key norms per head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.checkpoint.mapping import EXPERT, STACKED, DenseSpec, FamilyMapping, ModelShape, decoder_dense, swiglu

if TYPE_CHECKING:
    from tierd.checkpoint.config import Config

__all__ = ["QWEN3_MOE", "stepped_shape"]


def stepped_shape(config: Config) -> ModelShape:
    """Sizes of the routed experts: every `decoder_sparse_step`-th layer has some, unless `mlp_only_layers` names it."""
    experts = config.integer("num_experts", "num_local_experts")
    step = config.integer("decoder_sparse_step", default=1)
    dense_layers = set(config.integers("mlp_only_layers"))
    return ModelShape(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("moe_intermediate_size"),
        top_k=config.integer("num_experts_per_tok", high=experts),
        vocab_size=config.integer("vocab_size"),
        layers={
            layer: experts
            for layer in range(config.integer("num_hidden_layers", high=1 << 16))
            if layer not in dense_layers and (layer + 1) % step == 0
        },
    )


def _dense(config: Config) -> dict[str, DenseSpec]:
    shape = stepped_shape(config)
    hidden = shape.hidden_size
    head_dim = config.integer("head_dim", default=hidden // config.integer("num_attention_heads"))
    dense = decoder_dense(
        config,
        head_dim=head_dim,
        qk_norm=(head_dim, head_dim),
        attention_bias=config.flag("attention_bias", default=False),
    )
    for layer in range(config.integer("num_hidden_layers")):
        prefix = f"model.layers.{layer}.mlp"
        if layer in shape.layers:
            dense[f"{prefix}.gate.weight"] = DenseSpec((shape.layers[layer], hidden), keep_precision=True)
        else:
            dense |= swiglu(prefix, config.integer("intermediate_size"), hidden)
    return dense


QWEN3_MOE = FamilyMapping(
    family="qwen3_moe",
    model_types=("qwen3_moe",),
    shape=stepped_shape,
    dense=_dense,
    expert=EXPERT,
    fused=(STACKED,),
)
