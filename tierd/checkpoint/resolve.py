"""Finding every tensor that a family needs in a checkpoint: by name, with shapes checked against the config.

Shapes never decide a layout: whether a block is stacked or stored per expert is read from the names, per block;
both at once is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tierd.checkpoint.reader import missing_tensors
from tierd.checkpoint.registry import family_for
from tierd.errors import StoreDamaged, UnsupportedModel
from tierd.store.shards import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierd.checkpoint.mapping import DenseSpec, FamilyMapping, ModelShape
    from tierd.checkpoint.reader import Checkpoint, SourceTensor

__all__ = ["FLOAT_DTYPES", "ExpertSource", "MatrixSource", "ResolvedModel", "resolve"]

FLOAT_DTYPES: Final = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class MatrixSource:
    """A matrix [rows, cols] inside a source tensor: `offset` counts from the start of the file."""

    tensor: SourceTensor
    offset: int
    rows: int
    cols: int

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in the source."""
        return tensor_bytes(self.tensor.dtype, (self.rows, self.cols))


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


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A checkpoint with every needed tensor found and checked.

    Attributes:
        mapping: the family.
        shape: sizes from the config.
        experts: sources in flat order, layer by layer.
        dense: source and specification by canonical name, in the family's order.
    """

    mapping: FamilyMapping
    shape: ModelShape
    experts: list[ExpertSource]
    dense: dict[str, tuple[SourceTensor, DenseSpec]]


def resolve(checkpoint: Checkpoint) -> ResolvedModel:
    """Finds all tensors of the checkpoint's family.

    Raises:
        UnsupportedModel: unknown family, quantised checkpoint, unsupported dtype, or tensors that it does not know.
        StoreDamaged: tensors are missing, there twice, or of another shape than the config says.
    """
    config = checkpoint.config
    mapping = family_for(config)
    config.refuse_quantised()
    shape = mapping.shape(config)
    if not shape.layers:
        raise UnsupportedModel(f"{config.where}: no layer has routed experts")
    finder = _Finder(checkpoint, mapping, shape)
    dense = {name: (finder.dense(name, spec), spec) for name, spec in mapping.dense(config).items()}
    experts = [source for layer in shape.layers for source in finder.layer(layer)]
    finder.finish()
    found = [(source, spec) for source, spec in dense.values() if source is not None]
    if len(found) != len(dense) or any(source is None for source in experts):
        raise AssertionError("finish() reports missing tensors")
    return ResolvedModel(
        mapping,
        shape,
        [source for source in experts if source is not None],
        dict(zip(dense, found, strict=True)),
    )


class _Finder:
    """Looks tensors up by name and collects what is missing and what is left over."""

    def __init__(self, checkpoint: Checkpoint, mapping: FamilyMapping, shape: ModelShape) -> None:
        self._checkpoint = checkpoint
        self._mapping = mapping
        self._shape = shape
        self._used: set[str] = set()
        self._missing: list[str] = []

    def dense(self, name: str, spec: DenseSpec) -> SourceTensor | None:
        """The dense tensor of that name or of one of its aliases."""
        there = [known for known in (name, *spec.aliases) if known in self._checkpoint.tensors]
        if len(there) > 1:
            raise self._twice(there[0], there[1])
        if not there:
            self._missing.append(name)
            return None
        return self._take(there[0], spec.shape)

    def layer(self, layer: int) -> list[ExpertSource | None]:
        """All experts of a layer, from stacked or single tensors, whichever names are there."""
        tensors = self._checkpoint.tensors
        forms = [(form.gate_up.format(layer=layer), form.down.format(layer=layer)) for form in self._mapping.fused]
        stacked = [form for form in forms if form[0] in tensors or form[1] in tensors]
        singles = [
            tuple(name.format(layer=layer, expert=expert) for name in self._mapping.expert)
            for expert in range(self._shape.layers[layer])
        ]
        single = next((name for names in singles for name in names if name in tensors), None)
        if stacked and single is not None:
            raise self._twice(next(name for name in stacked[0] if name in tensors), single)
        if len(stacked) > 1:
            raise self._twice(stacked[0][0], stacked[1][0])
        if stacked:
            return self._stacked(layer, *stacked[0])
        return [self._single(names) for names in singles]

    def finish(self) -> None:
        """Refuses missing and left-over tensors, naming them."""
        checkpoint = self._checkpoint
        if self._missing:
            raise missing_tensors(checkpoint.folder, self._missing, len(checkpoint.tensors), len(checkpoint.headers))
        tied = checkpoint.config.flag("tie_word_embeddings", default=False)
        extra = [
            name
            for name in checkpoint.tensors
            if name not in self._used and not self._mapping.skips(name) and not (tied and name == "lm_head.weight")
        ]
        if extra:
            shown = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
            raise UnsupportedModel(
                f"{checkpoint.folder}: {len(extra)} tensors that {self._mapping.family} does not know: {shown}",
                hint="Leaving tensors out could change every token, so it is not guessed.",
            )

    def _single(self, names: tuple[str, ...]) -> ExpertSource | None:
        lost = [name for name in names if name not in self._checkpoint.tensors]
        if lost:
            self._missing += lost
            return None
        hidden, width = self._shape.hidden_size, self._shape.intermediate_size
        sizes = ((width, hidden), (width, hidden), (hidden, width))
        gate, up, down = (
            MatrixSource(tensor := self._take(name, size), tensor.offset, *size)
            for name, size in zip(names, sizes, strict=True)
        )
        return ExpertSource(gate, up, down)

    def _stacked(self, layer: int, gate_up_name: str, down_name: str) -> list[ExpertSource | None]:
        lost = [name for name in (gate_up_name, down_name) if name not in self._checkpoint.tensors]
        if lost:
            self._missing += lost
            return [None]
        hidden, width = self._shape.hidden_size, self._shape.intermediate_size
        count = self._shape.layers[layer]
        gate_up = self._take(gate_up_name, (count, 2 * width, hidden))
        down = self._take(down_name, (count, hidden, width))
        half = tensor_bytes(gate_up.dtype, (width, hidden))
        whole = tensor_bytes(down.dtype, (hidden, width))
        return [
            ExpertSource(
                MatrixSource(gate_up, gate_up.offset + 2 * half * expert, width, hidden),
                MatrixSource(gate_up, gate_up.offset + 2 * half * expert + half, width, hidden),
                MatrixSource(down, down.offset + whole * expert, hidden, width),
            )
            for expert in range(count)
        ]

    def _take(self, name: str, shape: tuple[int, ...]) -> SourceTensor:
        tensor = self._checkpoint.tensors[name]
        if tensor.shape != shape:
            raise StoreDamaged(
                f"{tensor.path}: tensor {name} has the shape {list(tensor.shape)}, config.json says {list(shape)}"
            )
        if tensor.dtype not in FLOAT_DTYPES:
            raise UnsupportedModel(
                f"{tensor.path}: tensor {name} has the dtype {tensor.dtype}; F32, BF16 and F16 are read"
            )
        self._used.add(name)
        return tensor

    def _twice(self, first: str, second: str) -> StoreDamaged:
        return StoreDamaged(
            f"{self._checkpoint.folder}: the same weights are there twice, as {first} and as {second}",
            hint="Remove one of the two copies; which one is right cannot be told from here.",
        )
