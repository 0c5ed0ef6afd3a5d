"""OLMoE (allenai/OLMoE-1B-7B): every layer has routed experts; query and key norms over the full width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.checkpoint.mapping import DenseSpec, FamilyMapping, ModelShape, StackedForm, decoder_dense

if TYPE_CHECKING:
    from tierd.checkpoint.config import Config

__all__ = ["OLMOE"]


def _shape(config: Config) -> ModelShape:
    experts = config.integer("num_experts", "num_local_experts")
    return ModelShape(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        top_k=config.integer("num_experts_per_tok", high=experts),
        vocab_size=config.integer("vocab_size"),
        layers=dict.fromkeys(range(config.integer("num_hidden_layers", high=1 << 16)), experts),
    )


def _dense(config: Config) -> dict[str, DenseSpec]:
    heads = config.integer("num_attention_heads")
    head_dim = config.integer("hidden_size") // heads
    kv_heads = config.integer("num_key_value_heads", default=heads)
    dense = decoder_dense(
        config,
        head_dim=head_dim,
        qk_norm=(heads * head_dim, kv_heads * head_dim),
        attention_bias=config.flag("attention_bias", default=False),
    )
    shape = _shape(config)
    for layer, experts in shape.layers.items():
        dense[f"model.layers.{layer}.mlp.gate.weight"] = DenseSpec((experts, shape.hidden_size), keep_precision=True)
    return dense


OLMOE = FamilyMapping(
    family="olmoe",
    model_types=("olmoe",),
    shape=_shape,
    dense=_dense,
    expert=(
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
        "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    ),
    fused=(StackedForm("model.layers.{layer}.mlp.experts.gate_up_proj", "model.layers.{layer}.mlp.experts.down_proj"),),
    skip=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
