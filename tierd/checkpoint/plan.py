"""What a conversion will write, known before the first byte: formats, record layout, every shard's header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tierd.checkpoint.resolve import ResolvedModel, resolve
from tierd.errors import UsageError
from tierd.store.checksums import sha256
from tierd.store.formats import DenseFormat, ExpertFormat
from tierd.store.geometry import ExpertLayer, Geometry
from tierd.store.manifest import DenseDtype, Shard
from tierd.store.records import PART_ALIGNMENT, expert_layout
from tierd.store.shards import ShardHeader, encode_header, tensor_bytes
from tierd.store.writing import ExpertShardPlan, plan_expert_shards, shard_entry

if TYPE_CHECKING:
    from pathlib import Path

    from tierd.checkpoint.mapping import DenseSpec
    from tierd.checkpoint.reader import Checkpoint, SourceTensor
    from tierd.checkpoint.resolve import ExpertSource

__all__ = ["NATIVE", "ConversionPlan", "DenseItem", "DenseShardPlan", "plan_conversion"]

NATIVE: Final = "native"
_STORED: Final[dict[str, str]] = {"f32": "F32", "bf16": "BF16", "i8": "I8"}


@dataclass(frozen=True, slots=True)
class DenseItem:
    """One stored dense tensor: its name and type, and the source it is made from.

    `scales` names the row scales that belong to int8 codes; `is_scales` marks those scales themselves.
    """

    name: str
    stored: DenseDtype
    shape: tuple[int, ...]
    source: SourceTensor
    scales: str | None = None
    is_scales: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in the store."""
        return tensor_bytes(_STORED[self.stored], self.shape)


@dataclass(frozen=True, slots=True)
class DenseShardPlan:
    """One dense shard before it is written; items in the order of the header."""

    file: str
    header: ShardHeader
    items: tuple[DenseItem, ...]

    @property
    def shard(self) -> Shard:
        """Its entry in the manifest."""
        return shard_entry(self.file, self.header)

    @property
    def sources(self) -> set[Path]:
        """Source files that it is made from."""
        return {item.source.path for item in self.items}


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Everything that a conversion writes, apart from small files.

    Attributes:
        model: the resolved checkpoint.
        geometry: of the store.
        expert_format: chosen, never "native".
        dense_format: chosen, never "native".
        dense: shards of dense tensors; written first, so that source shards become free as experts go on.
        experts: shards of expert records.
        remarks: what "native" came to, and the like.
    """

    model: ResolvedModel
    geometry: Geometry
    expert_format: ExpertFormat
    dense_format: DenseFormat
    dense: list[DenseShardPlan]
    experts: list[ExpertShardPlan]
    remarks: list[str]

    @property
    def shards(self) -> list[DenseShardPlan | ExpertShardPlan]:
        """All shards in the order of writing."""
        return [*self.dense, *self.experts]

    @property
    def shard_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(plan.header.file_bytes for plan in self.shards)

    @property
    def digest(self) -> str:
        """SHA-256 over names and headers of all shards: two plans with the same digest write the same files."""
        lines = [f"{plan.file} {sha256(plan.header.raw)}" for plan in self.shards]
        return sha256("\n".join([self.expert_format, self.dense_format, *lines]).encode())

    def expert_sources(self, plan: ExpertShardPlan) -> list[ExpertSource]:
        """Sources of a shard's experts."""
        return self.model.experts[plan.flats.start : plan.flats.stop]

    def source_files(self, plan: DenseShardPlan | ExpertShardPlan) -> set[Path]:
        """Source files that a shard is made from."""
        if isinstance(plan, DenseShardPlan):
            return plan.sources
        return {matrix.tensor.path for source in self.expert_sources(plan) for _, matrix in source}


def plan_conversion(checkpoint: Checkpoint, *, experts: str, dense: str, shard_bytes: int) -> ConversionPlan:
    """Chooses formats and cuts the output into shards.

    "native" is lossless: bf16 where all tensors of the kind are bf16, else f32 (f16 and bf16 widen exactly).

    Raises:
        UsageError: unknown format.
        UnsupportedModel: the family, or one of its tensors, is not known.
        StoreDamaged: the checkpoint is incomplete or inconsistent.
    """
    _known(experts, [NATIVE, *ExpertFormat], "--experts")
    _known(dense, [NATIVE, *DenseFormat], "--dense")
    model = resolve(checkpoint)
    remarks: list[str] = []
    expert_dtypes = {matrix.tensor.dtype for source in model.experts for _, matrix in source}
    dense_dtypes = {tensor.dtype for tensor, spec in model.dense.values() if not spec.keep_precision}
    expert_format = ExpertFormat(_resolve_native(experts, expert_dtypes, "experts", remarks))
    dense_format = DenseFormat(_resolve_native(dense, dense_dtypes, "dense tensors", remarks))
    shape = model.shape
    layout = expert_layout(expert_format, shape.hidden_size, shape.intermediate_size)
    geometry = Geometry(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        top_k=shape.top_k,
        vocab_size=shape.vocab_size,
        layers=tuple(ExpertLayer(layer=layer, experts=count, layout=0) for layer, count in shape.layers.items()),
        layouts=(layout,),
    )
    return ConversionPlan(
        model,
        geometry,
        expert_format,
        dense_format,
        _plan_dense(model, dense_format, shard_bytes),
        plan_expert_shards(geometry, shard_bytes),
        remarks,
    )


def _known(value: str, choices: list[str], option: str) -> None:
    if value not in choices:
        raise UsageError(f"{option} {value!r} is not known", hint=f"Choose one of: {', '.join(choices)}.")


def _resolve_native(wanted: str, dtypes: set[str], kind: str, remarks: list[str]) -> str:
    if wanted != NATIVE:
        return wanted
    if dtypes <= {"BF16"}:
        return "bf16"
    others = sorted(dtypes - {"F32"})
    if others:
        remarks.append(f"{kind}: {' and '.join(others)} widened to f32, which loses nothing")
    return "f32"


def _plan_dense(model: ResolvedModel, dense_format: DenseFormat, shard_bytes: int) -> list[DenseShardPlan]:
    """Cuts the dense tensors, in the family's order, into shards; a matrix and its scales stay together."""
    units = [_dense_unit(name, source, spec, dense_format) for name, (source, spec) in model.dense.items()]
    shards: list[list[DenseItem]] = []
    held = 0
    for unit in units:
        size = sum(item.nbytes for item in unit)
        if not shards or held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1] += unit
        held += size
    return [_dense_shard(number, items) for number, items in enumerate(shards, start=1)]


def _dense_unit(name: str, source: SourceTensor, spec: DenseSpec, dense_format: DenseFormat) -> list[DenseItem]:
    """What is stored for one dense tensor: itself, or int8 codes with their row scales."""
    own: DenseDtype = "bf16" if source.dtype == "BF16" else "f32"
    if spec.keep_precision or (dense_format is DenseFormat.INT8 and len(source.shape) != 2):
        return [DenseItem(name, own, source.shape, source)]
    match dense_format:
        case DenseFormat.F32:
            return [DenseItem(name, "f32", source.shape, source)]
        case DenseFormat.BF16:
            return [DenseItem(name, "bf16", source.shape, source)]
        case DenseFormat.INT8:
            scales = f"{name}.scales"
            return [
                DenseItem(name, "i8", source.shape, source, scales=scales),
                DenseItem(scales, "f32", source.shape[:1], source, is_scales=True),
            ]


def _dense_shard(number: int, items: list[DenseItem]) -> DenseShardPlan:
    # The format allows no holes: tensors of whole 64-byte lines come first, in their order, so that each is
    # aligned; the others follow by falling element size, so that each is aligned to its elements.
    def rank(item: DenseItem) -> int:
        return 0 if item.nbytes % PART_ALIGNMENT == 0 else -tensor_bytes(_STORED[item.stored], ())

    whole = [item for item in items if rank(item) == 0]
    ordered = [*whole, *sorted((item for item in items if rank(item) != 0), key=rank)]
    header = encode_header(
        ((item.name, _STORED[item.stored], item.shape) for item in ordered), alignment=PART_ALIGNMENT
    )
    return DenseShardPlan(f"dense-{number:05d}.safetensors", header, tuple(ordered))
