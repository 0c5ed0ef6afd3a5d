"""Mixtral (mistralai/Mixtral-8x7B): every layer has routed experts, published as w1 (gate), w3 (up), w2 (down)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.checkpoint.mapping import DenseSpec, FamilyMapping, ModelShape, StackedForm, decoder_dense

if TYPE_CHECKING:
    from tierd.checkpoint.config import Config

__all__ = ["MIXTRAL"]


def _shape(config: Config) -> ModelShape:
    experts = config.integer("num_local_experts", "num_experts")
    return ModelShape(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        top_k=config.integer("num_experts_per_tok", high=experts),
        vocab_size=config.integer("vocab_size"),
        layers=dict.fromkeys(range(config.integer("num_hidden_layers", high=1 << 16)), experts),
    )


def _dense(config: Config) -> dict[str, DenseSpec]:
    shape = _shape(config)
    head_dim = config.integer("head_dim", default=shape.hidden_size // config.integer("num_attention_heads"))
    dense = decoder_dense(config, head_dim=head_dim, qk_norm=None, attention_bias=False)
    for layer, experts in shape.layers.items():
        dense[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = DenseSpec(
            (experts, shape.hidden_size),
            keep_precision=True,
            aliases=(f"model.layers.{layer}.mlp.gate.weight",),
        )
    return dense


MIXTRAL = FamilyMapping(
    family="mixtral",
    model_types=("mixtral",),
    shape=_shape,
    dense=_dense,
    expert=(
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
    ),
    fused=(
        StackedForm(
            "model.layers.{layer}.block_sparse_moe.experts.gate_up_proj",
            "model.layers.{layer}.block_sparse_moe.experts.down_proj",
        ),
        StackedForm("model.layers.{layer}.mlp.experts.gate_up_proj", "model.layers.{layer}.mlp.experts.down_proj"),
    ),
    skip=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
