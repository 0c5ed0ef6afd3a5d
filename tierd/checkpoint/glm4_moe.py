"""GLM-4.5 and 4.6 (zai-org/GLM-4.5): grouped queries, the first layers dense, a shared expert in the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.checkpoint.deepseek_v3 import drafting_layers, sparse_mlp, sparse_shape
from tierd.checkpoint.mapping import EXPERT, STACKED, FamilyMapping, decoder_dense

if TYPE_CHECKING:
    from tierd.checkpoint.config import Config
    from tierd.checkpoint.mapping import DenseSpec, ModelShape

__all__ = ["GLM4_MOE"]


def _shape(config: Config) -> ModelShape:
    return sparse_shape(config, leading=1)


def _dense(config: Config) -> dict[str, DenseSpec]:
    shape = _shape(config)
    head_dim = config.integer("head_dim", default=shape.hidden_size // config.integer("num_attention_heads"))
    dense = decoder_dense(
        config,
        head_dim=head_dim,
        qk_norm=(head_dim, head_dim) if config.flag("use_qk_norm", default=False) else None,
        attention_bias=config.flag("attention_bias", default=False),
        output_bias=False,
    )
    for layer in range(config.integer("num_hidden_layers")):
        dense |= sparse_mlp(config, shape, layer)
    return dense


GLM4_MOE = FamilyMapping(
    family="glm4_moe",
    model_types=("glm4_moe",),
    shape=_shape,
    dense=_dense,
    expert=EXPERT,
    fused=(STACKED,),
    kept=drafting_layers,
)
