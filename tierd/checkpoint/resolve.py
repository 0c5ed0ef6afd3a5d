"""Finding every tensor that a family needs in a checkpoint: by name, with shapes checked against the config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierd.checkpoint.expert_finder import ExpertFinder
from tierd.checkpoint.finder import FLOAT_DTYPES, FP8_DTYPE, KEPT_DTYPES, Finder
from tierd.checkpoint.mapping import DenseSpec
from tierd.checkpoint.quantisation import Quantisation
from tierd.checkpoint.registry import family_for
from tierd.errors import UnsupportedModel

if TYPE_CHECKING:
    from tierd.checkpoint.expert_sources import ExpertSource
    from tierd.checkpoint.mapping import FamilyMapping, ModelShape
    from tierd.checkpoint.reader import Checkpoint, SourceTensor

__all__ = ["ResolvedModel", "resolve"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A checkpoint with every needed tensor found and checked.

    Attributes:
        mapping: the family.
        shape: sizes from the config.
        experts: sources in flat order, layer by layer.
        dense: source and specification by canonical name, in the family's order.
        dense_scales: the scales of those of them that hold codes.
    """

    mapping: FamilyMapping
    shape: ModelShape
    experts: list[ExpertSource]
    dense: dict[str, tuple[SourceTensor, DenseSpec]]
    dense_scales: dict[str, SourceTensor] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """Short name of the family."""
        return self.mapping.family


def resolve(checkpoint: Checkpoint) -> ResolvedModel:
    """Finds all tensors of the checkpoint's family.

    Raises:
        UnsupportedModel: unknown family, codes or dtypes, or tensors that the family does not know.
        StoreDamaged: tensors are missing, there twice, or of another shape than the config says.
    """
    config = checkpoint.config
    mapping = family_for(config)
    quantisation = Quantisation.read(config)
    shape = mapping.shape(config)
    if not shape.layers:
        raise UnsupportedModel(f"{config.where}: no layer has routed experts")
    finder = Finder(checkpoint, mapping, quantisation)
    dense: dict[str, tuple[SourceTensor, DenseSpec]] = {}
    scales: dict[str, SourceTensor] = {}
    for name, spec in mapping.dense(config).items():
        published = _published_name(finder, name, spec)
        if published is not None and (own := _dense_scales(finder, published, spec)) is not None:
            scales[name] = own
        if published is not None:
            dtypes = (*FLOAT_DTYPES, FP8_DTYPE) if name in scales else FLOAT_DTYPES
            dense[name] = finder.take(published, spec.shape, dtypes), spec
    layers = ExpertFinder(finder, mapping, shape)
    experts = [layers.layer(layer) for layer in shape.layers]
    for name, tensor in checkpoint.tensors.items():
        if name.startswith(mapping.kept(config)) and not finder.took(name):
            spec = DenseSpec(tensor.shape, keep_precision=True)
            if (own := _dense_scales(finder, name, spec)) is not None:
                scales[name] = own
            dense[name] = finder.take(name, tensor.shape, KEPT_DTYPES), spec
    finder.finish()
    return ResolvedModel(mapping, shape, [source for layer in experts for source in layer or ()], dense, scales)


def _published_name(finder: Finder, name: str, spec: DenseSpec) -> str | None:
    """The name under which a dense tensor is there; None, noted as missing, if it is not."""
    there = [known for known in (name, *spec.aliases) if finder.has(known)]
    if len(there) > 1:
        raise finder.twice(there[0], there[1])
    if not there:
        finder.lack([name])
        return None
    return there[0]


def _dense_scales(finder: Finder, name: str, spec: DenseSpec) -> SourceTensor | None:
    """The scales of a dense matrix of 8-bit floats; None for plain ones."""
    if len(spec.shape) != 2 or not finder.is_fp8(name):
        return None
    return finder.take_fp8_scales(name, *spec.shape)
