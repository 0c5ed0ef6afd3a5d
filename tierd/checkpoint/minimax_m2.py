"""MiniMax M2 (MiniMaxAI/MiniMax-M2): every layer has routed experts, published as w1 (gate), w3 (up), w2 (down)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.checkpoint.mapping import (
    STACKED,
    DenseSpec,
    FamilyMapping,
    ModelShape,
    StackedForm,
    alike_layers,
    decoder_dense,
)

if TYPE_CHECKING:
    from tierd.checkpoint.config import Config

__all__ = ["MINIMAX_M2"]

_BLOCK = "model.layers.{layer}.block_sparse_moe"


def _shape(config: Config) -> ModelShape:
    return alike_layers(config, top_k=8)


def _dense(config: Config) -> dict[str, DenseSpec]:
    shape, heads = _shape(config), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", default=shape.hidden_size // heads)
    kv_heads = config.integer("num_key_value_heads", default=heads)
    dense = decoder_dense(
        config, head_dim=head_dim, qk_norm=(heads * head_dim, kv_heads * head_dim), attention_bias=False
    )
    for layer, experts in shape.layers.items():
        block = _BLOCK.format(layer=layer)
        dense[f"{block}.gate.weight"] = DenseSpec(
            (experts, shape.hidden_size), keep_precision=True, aliases=(f"model.layers.{layer}.mlp.gate.weight",)
        )
        dense[f"{block}.e_score_correction_bias"] = DenseSpec(
            (experts,),
            keep_precision=True,
            aliases=(
                f"{block}.gate.e_score_correction_bias",
                f"model.layers.{layer}.mlp.e_score_correction_bias",
                f"model.layers.{layer}.mlp.gate.e_score_correction_bias",
            ),
        )
    return dense


def _drafting(_config: Config) -> tuple[str, ...]:
    return "model.mtp_modules.", "mtp."


MINIMAX_M2 = FamilyMapping(
    family="minimax_m2",
    model_types=("minimax_m2",),
    shape=_shape,
    dense=_dense,
    expert=tuple(f"{_BLOCK}.experts.{{expert}}.{part}.weight" for part in ("w1", "w3", "w2")),
    fused=(
        StackedForm(f"{_BLOCK}.experts.gate_up_proj", f"{_BLOCK}.experts.down_proj"),
        STACKED,
    ),
    kept=_drafting,
)
