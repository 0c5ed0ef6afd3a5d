"""Which families are known, by the `model_type` of their config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from compute_node.models import mixtral, olmoe, qwen3_moe
from compute_node.models.config_reader import ConfigReader
from compute_node.models.decoder import DecoderBuilder
from compute_node.models.decoder_config import DecoderConfig
from tierd.errors import UnsupportedModel

__all__ = ["FAMILIES", "Family", "family_of"]


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's config is read and how one of its layers is built.

    Attributes:
        model_type: the name in config.json.
        read_config: settings to sizes and switches.
        decoder_layer: appends the ops of one layer to a program.
    """

    model_type: str
    read_config: Callable[[ConfigReader], DecoderConfig]
    decoder_layer: Callable[[DecoderBuilder, int], None]


FAMILIES: Final = {
    family.model_type: family
    for family in (
        Family("mixtral", mixtral.read_config, mixtral.decoder_layer),
        Family("olmoe", olmoe.read_config, olmoe.decoder_layer),
        Family("qwen3_moe", qwen3_moe.read_config, qwen3_moe.decoder_layer),
    )
}


def family_of(config: Mapping[str, Any]) -> tuple[Family, DecoderConfig]:
    """The family of a parsed config.json and what its settings say; UnsupportedModel if either is not known."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModel(
            f"model_type {model_type!r} is not known", hint=f"Known families: {', '.join(FAMILIES)}."
        )
    return family, family.read_config(ConfigReader(config, family.model_type))
