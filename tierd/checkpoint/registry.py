"""The known families; an unknown one is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierd.checkpoint.mixtral import MIXTRAL
from tierd.checkpoint.olmoe import OLMOE
from tierd.checkpoint.qwen3_moe import QWEN3_MOE
from tierd.errors import UnsupportedModel

if TYPE_CHECKING:
    from tierd.checkpoint.config import Config
    from tierd.checkpoint.mapping import FamilyMapping

__all__ = ["FAMILIES", "family_for"]

FAMILIES: Final = (OLMOE, MIXTRAL, QWEN3_MOE)


def family_for(config: Config) -> FamilyMapping:
    """The mapping for the config's `model_type`; UnsupportedModel with the list of known ones otherwise."""
    for mapping in FAMILIES:
        if config.model_type in mapping.model_types:
            return mapping
    known = ", ".join(sorted(name for mapping in FAMILIES for name in mapping.model_types))
    raise UnsupportedModel(
        f"{config.where}: unknown model_type {config.model_type[:100]!r}", hint=f"Known model types: {known}."
    )
