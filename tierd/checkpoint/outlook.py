"""How large a store will be, from a checkpoint's config.json alone: nothing else needs to be downloaded yet."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from tierd.checkpoint.config import Config
from tierd.checkpoint.plan import MADE_DENSE
from tierd.checkpoint.quantisation import Coding, Quantisation
from tierd.checkpoint.registry import family_for
from tierd.errors import UnsupportedModel
from tierd.store.formats import MADE_FORMATS, DenseFormat, ExpertFormat
from tierd.store.geometry import ExpertLayer, Geometry
from tierd.store.records import FP8_BLOCK, expert_layout

if TYPE_CHECKING:
    from tierd.checkpoint.mapping import DenseSpec

__all__ = ["Outlook", "look_ahead"]

_DENSE_BYTES = {DenseFormat.F32: 4.0, DenseFormat.BF16: 2.0, DenseFormat.INT8: 1.0, DenseFormat.FP8: 1.0}
_KEPT_BYTES = 4.0
"""Routers, norms and biases keep their own precision: 2 or 4 bytes."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a checkpoint would become.

    Attributes:
        family: of the model.
        geometry: by expert format that it can be converted to.
        dense_bytes: by dense format, scales included; of fp8 as if every matrix but embedding and head had codes.
        native: the format of codes in which it is published; None if it is published plain.
    """

    family: str
    geometry: dict[ExpertFormat, Geometry]
    dense_bytes: dict[DenseFormat, int]
    native: ExpertFormat | None


def look_ahead(folder: Path) -> Outlook:
    """Read the config of a checkpoint.

    Raises:
        StoreDamaged: config.json is missing or no JSON.
        UnsupportedModel: the family or its codes are not known, or no layer has routed experts.
    """
    config = Config.read(folder)
    family = family_for(config)
    shape = family.shape(config)
    if not shape.layers:
        raise UnsupportedModel(f"{config.where}: no layer has routed experts")
    coding = Quantisation.read(config).coding
    formats = (*([coding.stored] if coding.stored is not None else []), *MADE_FORMATS)
    layers = tuple(ExpertLayer(layer=layer, experts=count, layout=0) for layer, count in shape.layers.items())
    geometry = {
        fmt: Geometry(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            top_k=shape.top_k,
            vocab_size=shape.vocab_size,
            layers=layers,
            layouts=(
                expert_layout(
                    fmt,
                    shape.hidden_size,
                    shape.intermediate_size,
                    activation=family.activation,
                    biases=family.expert_biases,
                ),
            ),
        )
        for fmt in formats
    }
    dense = {
        fmt: sum(_dense_bytes(name, spec, fmt) for name, spec in family.dense(config).items())
        for fmt in (*MADE_DENSE, *([DenseFormat.FP8] if coding is Coding.FP8 else []))
    }
    return Outlook(family.family, geometry, {fmt: int(nbytes) for fmt, nbytes in dense.items()}, coding.stored)


def _dense_bytes(name: str, spec: DenseSpec, fmt: DenseFormat) -> float:
    """Bytes of one tensor with its scales."""
    count = prod(spec.shape)
    if spec.keep_precision or (fmt is DenseFormat.INT8 and len(spec.shape) != 2):
        return count * _KEPT_BYTES
    if fmt is DenseFormat.FP8 and (len(spec.shape) != 2 or "embed" in name or "lm_head" in name):
        return count * _DENSE_BYTES[DenseFormat.BF16]
    rows = {DenseFormat.INT8: spec.shape[0], DenseFormat.FP8: count / FP8_BLOCK**2}.get(fmt, 0)
    return count * _DENSE_BYTES[fmt] + 4.0 * rows
