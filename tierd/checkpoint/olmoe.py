"""OLMoE (allenai/OLMoE-1B-7B): every layer has routed experts; query and key norms over the full width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.checkpoint.mapping import EXPERT, INV_FREQ, STACKED, DenseSpec, FamilyMapping, alike_layers, decoder_dense

if TYPE_CHECKING:
    from tierd.checkpoint.config import Config

__all__ = ["OLMOE"]


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
    shape = alike_layers(config)
    for layer, experts in shape.layers.items():
        dense[f"model.layers.{layer}.mlp.gate.weight"] = DenseSpec((experts, shape.hidden_size), keep_precision=True)
    return dense


OLMOE = FamilyMapping(
    family="olmoe",
    model_types=("olmoe",),
    shape=alike_layers,
    dense=_dense,
    expert=EXPERT,
    fused=(STACKED,),
    skip=(INV_FREQ,),
)
