"""Where the matrices of routed experts come from: places in published tensors, and how they are to be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tierd.checkpoint.encode import encode_matrix
from tierd.checkpoint.quantisation import Coding
from tierd.store.formats import ExpertFormat
from tierd.store.reading import aligned_buffer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np

    from tierd.checkpoint.reader import SourceTensor
    from tierd.store.records import RecordLayout

__all__ = ["ExpertSource", "MatrixSource", "Outputs", "RecordSource", "Span"]


class RecordSource(Protocol):
    """What a conversion needs to know of an expert."""

    @property
    def paths(self) -> frozenset[Path]:
        """Source files that it is made from."""

    def encode(self, layout: RecordLayout) -> np.ndarray:
        """Its record: uint8 [record_bytes], padding zero."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes in a source tensor; `offset` counts from the start of the file."""

    tensor: SourceTensor
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """Which outputs of the block that is read belong to a matrix: `first`, `first + step`, and so on.

    Attributes:
        total: outputs of the block.
        first: the first one.
        step: 2 where gate and up take turns.
        transposed: the block has one column per output instead of one row.
    """

    total: int
    first: int = 0
    step: int = 1
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class MatrixSource:
    """A matrix [rows, cols] of an expert.

    Attributes:
        rows: outputs.
        cols: inputs.
        weights: the block of weights or codes that holds it.
        outputs: which of the block's outputs it is made from.
        coding: how the weights are published.
        scales: the scales of the block; None for plain weights.
        group_size: columns that share a scale.
        bias: float values [outputs of the block], of which it has its own; None without biases.
    """

    rows: int
    cols: int
    weights: Span
    outputs: Outputs
    coding: Coding = Coding.PLAIN
    scales: Span | None = None
    group_size: int = 0
    bias: Span | None = None

    @property
    def tensor(self) -> SourceTensor:
        """The tensor of its weights or codes."""
        return self.weights.tensor


@dataclass(frozen=True, slots=True)
class ExpertSource:
    """Where the three matrices of one expert come from."""

    gate: MatrixSource
    up: MatrixSource
    down: MatrixSource

    def __iter__(self) -> Iterator[tuple[str, MatrixSource]]:
        yield "gate", self.gate
        yield "up", self.up
        yield "down", self.down

    @property
    def paths(self) -> frozenset[Path]:
        """See `RecordSource`."""
        spans = [span for _, m in self for span in (m.weights, m.scales, m.bias) if span is not None]
        return frozenset(span.tensor.path for span in spans)

    def encode(self, layout: RecordLayout) -> np.ndarray:
        """See `RecordSource`.

        Raises:
            DriveError: the source cannot be read.
            UsageError: a weight cannot be quantised; the tensor is named.
            StoreDamaged: a scale that no store can hold; the tensor is named.
        """
        record = aligned_buffer(layout.record_bytes)
        record[:] = 0
        views = layout.views(record)
        for name, matrix in self:
            encode_matrix(matrix, ExpertFormat(layout.format), views, name)
        return record
