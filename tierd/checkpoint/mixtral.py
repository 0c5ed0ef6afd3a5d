"""Mixtral (mistralai/Mixtral-8x7B): every layer has routed experts, published as w1 (gate), w3 (up), w2 (down)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.checkpoint.mapping import (
    INV_FREQ,
    STACKED,
    DenseSpec,
    FamilyMapping,
    StackedForm,
    alike_layers,
    decoder_dense,
)

if TYPE_CHECKING:
    from tierd.checkpoint.config import Config

__all__ = ["MIXTRAL"]


def _dense(config: Config) -> dict[str, DenseSpec]:
    shape = alike_layers(config)
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
    shape=alike_layers,
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
        STACKED,
    ),
    skip=(INV_FREQ,),
)
