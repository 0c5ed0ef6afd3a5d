"""Which families are known, by the `model_type` of their config.json.

A family's module is imported when it is wanted: each brings kernels that take a tenth of a second to load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from compute_node.engine.cache_layout import CacheLayout, grouped_query_layout
from compute_node.models.config_reader import ConfigReader
from compute_node.models.decoder import DecoderBuilder
from compute_node.models.decoder_config import DecoderConfig
from tierd.checkpoint.config import text_settings
from tierd.checkpoint.registry import refusal

__all__ = ["FAMILIES", "Family", "family_of"]


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's config is read and how one of its layers is built.

    Attributes:
        model_type: the name in config.json.
        read_config: settings to sizes and switches.
        decoder_layer: appends the ops of one layer to a program.
        cache_layout: what the family keeps of its tokens.
    """

    model_type: str
    read_config: Callable[[ConfigReader], DecoderConfig]
    decoder_layer: Callable[[DecoderBuilder, int], None]
    cache_layout: Callable[[DecoderConfig], CacheLayout] = grouped_query_layout


FAMILIES: Final = {
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    "glm4_moe": "glm4_moe",
    "glm_moe_dsa": "glm_moe_dsa",
    "gpt_oss": "gpt_oss",
    "kimi_k2": "deepseek_v3",
    "minimax_m2": "minimax_m2",
    "mixtral": "mixtral",
    "olmoe": "olmoe",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_next",
}
"""The module of each `model_type`; it has `read_config`, `decoder_layer` and, if it differs, `cache_layout`."""


def family_of(config: Mapping[str, Any]) -> tuple[Family, DecoderConfig]:
    """The family of a parsed config.json and what its settings say; UnsupportedModel if either is not known.

    Of a composite the text model counts.
    """
    settings = text_settings(config)
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise refusal("config.json", str(model_type))
    module = import_module(f"compute_node.models.{FAMILIES[model_type]}")
    layout = getattr(module, "cache_layout", grouped_query_layout)
    family = Family(model_type, module.read_config, module.decoder_layer, layout)
    return family, family.read_config(ConfigReader(settings, model_type))
