"""How large a store will be, from a checkpoint's config.json alone: nothing else needs to be downloaded yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tierd.checkpoint.config import Config
from tierd.checkpoint.registry import family_for
from tierd.errors import UnsupportedModel
from tierd.store.formats import DenseFormat, ExpertFormat
from tierd.store.geometry import ExpertLayer, Geometry
from tierd.store.records import expert_layout

__all__ = ["Outlook", "look_ahead"]

_DENSE_BYTES = {DenseFormat.F32: 4.0, DenseFormat.BF16: 2.0, DenseFormat.INT8: 1.0}
_KEPT_BYTES = 4.0
"""Routers, norms and biases keep their own precision: 2 or 4 bytes."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a checkpoint would become.

    Attributes:
        family: of the model.
        geometry: by expert format.
        dense_bytes: by dense format, the scales of int8 rows included.
    """

    family: str
    geometry: dict[ExpertFormat, Geometry]
    dense_bytes: dict[DenseFormat, int]


def look_ahead(folder: Path) -> Outlook:
    """Read the config of a checkpoint.

    Raises:
        StoreDamaged: config.json is missing or no JSON.
        UnsupportedModel: the family is not known, or no layer has routed experts.
    """
    config = Config.read(folder)
    family = family_for(config)
    shape = family.shape(config)
    if not shape.layers:
        raise UnsupportedModel(f"{config.where}: no layer has routed experts")
    layers = tuple(ExpertLayer(layer=layer, experts=count, layout=0) for layer, count in shape.layers.items())
    geometry = {
        fmt: Geometry(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            top_k=shape.top_k,
            vocab_size=shape.vocab_size,
            layers=layers,
            layouts=(expert_layout(fmt, shape.hidden_size, shape.intermediate_size),),
        )
        for fmt in ExpertFormat
    }
    dense = dict.fromkeys(DenseFormat, 0.0)
    for spec in family.dense(config).values():
        count = 1
        for size in spec.shape:
            count *= size
        for fmt in DenseFormat:
            matrix = not spec.keep_precision and (fmt is not DenseFormat.INT8 or len(spec.shape) == 2)
            each = _DENSE_BYTES[fmt] if matrix else _KEPT_BYTES
            scales = 4.0 * spec.shape[0] if matrix and fmt is DenseFormat.INT8 else 0.0
            dense[fmt] += count * each + scales
    return Outlook(family.family, geometry, {fmt: int(nbytes) for fmt, nbytes in dense.items()})
