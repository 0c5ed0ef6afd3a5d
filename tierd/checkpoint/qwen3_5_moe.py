"""Qwen3.5 and Qwen3.6 (Qwen/Qwen3.5-35B-A3B): the layers of Qwen3-Next, with projections apart and experts stacked.

The release is a composite: text under `model.language_model.`, vision under `model.visual.`, drafting under `mtp.`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.checkpoint.mapping import EXPERT, STACKED, FamilyMapping
from tierd.checkpoint.qwen3_moe import stepped_shape
from tierd.checkpoint.qwen3_next import drafting, hybrid_dense

if TYPE_CHECKING:
    from tierd.checkpoint.config import Config
    from tierd.checkpoint.mapping import DenseSpec

__all__ = ["QWEN3_5_MOE"]


def _dense(config: Config) -> dict[str, DenseSpec]:
    return hybrid_dense(config, fused=False)


QWEN3_5_MOE = FamilyMapping(
    family="qwen3_5_moe",
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    shape=stepped_shape,
    dense=_dense,
    expert=EXPERT,
    fused=(STACKED,),
    kept=drafting,
    towers=("model.visual.",),
)
