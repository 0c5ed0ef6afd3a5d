"""The known families; an unknown one is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierd.checkpoint.deepseek_v3 import DEEPSEEK_V3, DEEPSEEK_V32
from tierd.checkpoint.glm4_moe import GLM4_MOE
from tierd.checkpoint.glm_moe_dsa import GLM_MOE_DSA
from tierd.checkpoint.gpt_oss import GPT_OSS
from tierd.checkpoint.minimax_m2 import MINIMAX_M2
from tierd.checkpoint.mixtral import MIXTRAL
from tierd.checkpoint.olmoe import OLMOE
from tierd.checkpoint.qwen3_5_moe import QWEN3_5_MOE
from tierd.checkpoint.qwen3_moe import QWEN3_MOE
from tierd.checkpoint.qwen3_next import QWEN3_NEXT
from tierd.errors import UnsupportedModel

if TYPE_CHECKING:
    from tierd.checkpoint.config import Config
    from tierd.checkpoint.mapping import FamilyMapping

__all__ = ["FAMILIES", "TO_COME", "family_for", "known_family", "refusal"]

FAMILIES: Final = (
    OLMOE,
    MIXTRAL,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_5_MOE,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM4_MOE,
    GLM_MOE_DSA,
    GPT_OSS,
    MINIMAX_M2,
)

TO_COME: Final = {
    "deepseek_v4": "DeepSeek V4",
    "glm5_next": "GLM-5.3-Flash",
    "inkling_mm_model": "Inkling",
    "inkling_text": "Inkling",
    "kimi_k3": "Kimi K3",
    "kimi_linear": "Kimi Linear",
    "minimax_m3_vl": "MiniMax M3",
    "minimax_m3_vl_text": "MiniMax M3",
    "muse_spark": "Muse Spark",
    "muse_spark_text": "Muse Spark",
}
"""Families that the native engine does not run yet, by `model_type`."""


def known_family(config: Config) -> FamilyMapping | None:
    """The mapping for the config's `model_type`, None if there is none."""
    model_type = config.table.get("model_type")
    return next((mapping for mapping in FAMILIES if model_type in mapping.model_types), None)


def family_for(config: Config) -> FamilyMapping:
    """The mapping for the config's `model_type`; UnsupportedModel with the list of known ones otherwise."""
    if mapping := known_family(config):
        return mapping
    raise refusal(config.where, config.model_type)


def refusal(where: str, model_type: str) -> UnsupportedModel:
    """The error for a model_type without a family; it says so where the family is known and still to come."""
    if model_type in TO_COME:
        return UnsupportedModel(
            f"{where}: {TO_COME[model_type]} (model_type {model_type!r}) is not run by the native engine yet",
            hint="Run it through transformers: --engine transformers.",
        )
    known = ", ".join(sorted(name for mapping in FAMILIES for name in mapping.model_types))
    return UnsupportedModel(f"{where}: unknown model_type {model_type[:100]!r}", hint=f"Known model types: {known}.")
