"""GLM-5 (zai-org/GLM-5): latent attention with an indexer that several layers may share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.checkpoint.deepseek_v3 import drafting_layers, latent_dense, sparse_shape
from tierd.checkpoint.mapping import EXPERT, STACKED, FamilyMapping
from tierd.errors import UnsupportedModel

if TYPE_CHECKING:
    from tierd.checkpoint.config import Config
    from tierd.checkpoint.mapping import DenseSpec

__all__ = ["GLM_MOE_DSA"]


def _indexed_layers(config: Config) -> list[int]:
    """Layers with an indexer of their own: a list, a pattern of F and S, or a period behind an offset."""
    layers = config.integer("num_hidden_layers", high=1 << 16)
    kinds = config.table.get("indexer_types") or config.table.get("index_topk_pattern")
    if kinds is None:
        period = config.integer("index_topk_freq", default=1)
        offset = config.integer("index_skip_topk_offset", default=2, low=0)
        return [layer for layer in range(layers) if max(layer - offset + 1, 0) % period == 0]
    known = ("full", "shared", "F", "S")
    if not isinstance(kinds, list | str) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise UnsupportedModel(
            f"{config.where}: indexer_types is {str(kinds)[:200]}; {layers} entries of full or shared are wanted"
        )
    return [layer for layer, kind in enumerate(kinds) if kind in ("full", "F")]


def _dense(config: Config) -> dict[str, DenseSpec]:
    return latent_dense(config, sparse_shape(config), indexed=_indexed_layers(config))


GLM_MOE_DSA = FamilyMapping(
    family="glm_moe_dsa",
    model_types=("glm_moe_dsa",),
    shape=sparse_shape,
    dense=_dense,
    expert=EXPERT,
    fused=(STACKED,),
    kept=drafting_layers,
)
