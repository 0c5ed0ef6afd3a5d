"""The shape of a model's routed experts: which layers have them, how many, and in what records."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from tierd.errors import LimitExceeded, StoreDamaged
from tierd.store.records import RecordLayout

__all__ = ["MAX_EXPERTS", "ExpertLayer", "Geometry", "Size"]

MAX_EXPERTS: Final = 1 << 22
"""Routed experts of a store, over all layers; the residency table has one word for each."""

Size = Annotated[int, Field(ge=1, le=1 << 24)]
"""One dimension of a matrix."""


class ExpertLayer(BaseModel):
    """A model layer that has routed experts.

    Attributes:
        layer: the model's own layer number.
        experts: number of routed experts, ids 0 to experts - 1.
        layout: index into `Geometry.layouts`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    layer: Annotated[int, Field(ge=0, le=1 << 16)]
    experts: Annotated[int, Field(ge=1, le=1 << 20)]
    layout: Annotated[int, Field(ge=0, le=1 << 16)]


class Geometry(BaseModel):
    """Sizes of a model's routed experts; layers without routed experts are absent.

    Experts are numbered flat, layer by layer in rising order: this number is the position in the index and in
    the residency table.

    Attributes:
        hidden_size: H, the width of the residual stream.
        intermediate_size: I, the width of one expert.
        top_k: experts chosen per token and layer.
        vocab_size: 0 where not known (synthetic stores).
        layers: in rising order of layer number.
        layouts: the record layouts that the layers refer to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: Size
    intermediate_size: Size
    top_k: Annotated[int, Field(ge=1, le=1 << 12)]
    vocab_size: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    layers: tuple[ExpertLayer, ...]
    layouts: tuple[RecordLayout, ...]

    _first: dict[int, tuple[int, ExpertLayer]] = PrivateAttr()
    _starts: list[int] = PrivateAttr()

    def model_post_init(self, context: object, /) -> None:
        """Checks what single fields cannot, and prepares the flat numbering."""
        del context
        if not self.layers:
            raise StoreDamaged("geometry: no layer has routed experts")
        numbers = [entry.layer for entry in self.layers]
        if any(a >= b for a, b in pairwise(numbers)):
            raise StoreDamaged("geometry: layers are not in rising order")
        for entry in self.layers:
            if entry.layout >= len(self.layouts):
                raise StoreDamaged(f"geometry: layer {entry.layer} names layout {entry.layout}, which is not there")
            if self.top_k > entry.experts:
                raise StoreDamaged(
                    f"geometry: top-{self.top_k} of {entry.experts} experts in layer {entry.layer} cannot be"
                )
        ends = list(accumulate(entry.experts for entry in self.layers))
        if ends[-1] > MAX_EXPERTS:
            raise StoreDamaged(f"geometry: {ends[-1]} experts are more than {MAX_EXPERTS}")
        self._starts = [0, *ends[:-1]]
        self._first = {entry.layer: (start, entry) for entry, start in zip(self.layers, self._starts, strict=True)}

    @property
    def experts_total(self) -> int:
        """Routed experts over all layers."""
        return self._starts[-1] + self.layers[-1].experts

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest record: the slot size of an arena that serves this store."""
        return max(self.layouts[entry.layout].record_bytes for entry in self.layers)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all expert records, padding included."""
        return sum(entry.experts * self.layouts[entry.layout].record_bytes for entry in self.layers)

    def experts_in(self, layer: int) -> int:
        """Number of routed experts of a layer; LimitExceeded if it has none."""
        return self._entry(layer)[1].experts

    def layout(self, layer: int) -> RecordLayout:
        """The record layout of a layer; LimitExceeded if it has no routed experts."""
        return self.layouts[self._entry(layer)[1].layout]

    def layer_start(self, layer: int) -> int:
        """Flat number of the layer's expert 0; LimitExceeded if the layer has no routed experts."""
        return self._entry(layer)[0]

    def flat(self, layer: int, expert: int) -> int:
        """Flat number of an expert; LimitExceeded on any layer or expert that does not exist."""
        start, entry = self._entry(layer)
        if not 0 <= expert < entry.experts:
            hint = f"Its experts are 0 to {entry.experts - 1}."
            raise LimitExceeded(f"layer {layer} has no expert {expert}", hint=hint)
        return start + expert

    def locate(self, flat: int) -> tuple[int, int]:
        """The (layer, expert) of a flat number; LimitExceeded if it is out of range."""
        if not 0 <= flat < self.experts_total:
            hint = f"They run from 0 to {self.experts_total - 1}."
            raise LimitExceeded(f"there is no expert with the flat number {flat}", hint=hint)
        position = bisect_right(self._starts, flat) - 1
        return self.layers[position].layer, flat - self._starts[position]

    def _entry(self, layer: int) -> tuple[int, ExpertLayer]:
        found = self._first.get(layer)
        if found is None:
            hint = f"Layers with experts lie between {self.layers[0].layer} and {self.layers[-1].layer}."
            raise LimitExceeded(f"layer {layer} has no routed experts", hint=hint)
        return found
