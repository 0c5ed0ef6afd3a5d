"""Qwen3-MoE (Qwen/Qwen3-30B-A3B): some layers may be dense; query and key norms per head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.checkpoint.mapping import DenseSpec, FamilyMapping, ModelShape, StackedForm, decoder_dense

if TYPE_CHECKING:
    from tierd.checkpoint.config import Config

__all__ = ["QWEN3_MOE"]


def _shape(config: Config) -> ModelShape:
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
    shape = _shape(config)
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
            width = config.integer("intermediate_size")
            dense[f"{prefix}.gate_proj.weight"] = DenseSpec((width, hidden))
            dense[f"{prefix}.up_proj.weight"] = DenseSpec((width, hidden))
            dense[f"{prefix}.down_proj.weight"] = DenseSpec((hidden, width))
    return dense


QWEN3_MOE = FamilyMapping(
    family="qwen3_moe",
    model_types=("qwen3_moe",),
    shape=_shape,
    dense=_dense,
    expert=(
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
        "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    ),
    fused=(StackedForm("model.layers.{layer}.mlp.experts.gate_up_proj", "model.layers.{layer}.mlp.experts.down_proj"),),
)
