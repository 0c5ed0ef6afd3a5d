"""gpt-oss (openai/gpt-oss-120b): experts stacked, gate and up taking turns, with biases; a sink for each head.

Published as MXFP4 codes with one row per output; saved as plain weights they lie transposed, one column per output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.checkpoint.mapping import DenseSpec, FamilyMapping, StackedForm, alike_layers, decoder_dense
from tierd.store.formats import Activation

if TYPE_CHECKING:
    from tierd.checkpoint.config import Config

__all__ = ["GPT_OSS"]


def _dense(config: Config) -> dict[str, DenseSpec]:
    shape = alike_layers(config)
    dense = decoder_dense(
        config,
        head_dim=config.integer("head_dim", default=64),
        qk_norm=None,
        attention_bias=config.flag("attention_bias", default=True),
    )
    for layer, experts in shape.layers.items():
        prefix = f"model.layers.{layer}"
        sinks = (config.integer("num_attention_heads"),)
        dense[f"{prefix}.self_attn.sinks"] = DenseSpec(sinks, keep_precision=True)
        dense[f"{prefix}.mlp.router.weight"] = DenseSpec((experts, shape.hidden_size), keep_precision=True)
        dense[f"{prefix}.mlp.router.bias"] = DenseSpec((experts,), keep_precision=True)
    return dense


GPT_OSS = FamilyMapping(
    family="gpt_oss",
    model_types=("gpt_oss",),
    shape=alike_layers,
    dense=_dense,
    expert=(),
    fused=(
        StackedForm(
            "model.layers.{layer}.mlp.experts.gate_up_proj",
            "model.layers.{layer}.mlp.experts.down_proj",
            interleaved=True,
            transposed=True,
            biases=(
                "model.layers.{layer}.mlp.experts.gate_up_proj_bias",
                "model.layers.{layer}.mlp.experts.down_proj_bias",
            ),
        ),
    ),
    activation=Activation.GPT_OSS,
)
