"""What a conversion will write, known before the first byte: formats, record layouts, every shard's header."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from tierd.checkpoint.finder import FP8_DTYPE
from tierd.checkpoint.quantisation import Coding
from tierd.checkpoint.resolve import ResolvedModel, resolve
from tierd.errors import UnsupportedModel, UsageError
from tierd.store.checksums import sha256
from tierd.store.dense import scales_shape
from tierd.store.formats import MADE_FORMATS, DenseFormat, ExpertFormat
from tierd.store.geometry import ExpertLayer, Geometry
from tierd.store.manifest import DenseDtype, Interface, Shard
from tierd.store.records import PART_ALIGNMENT, RecordLayout, expert_layout
from tierd.store.shards import ShardHeader, encode_header, tensor_bytes
from tierd.store.writing import ExpertShardPlan, plan_expert_shards, shard_entry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tierd.checkpoint.expert_sources import ExpertSource, RecordSource
    from tierd.checkpoint.mapping import DenseSpec
    from tierd.checkpoint.reader import Checkpoint, SourceTensor

__all__ = [
    "MADE_DENSE",
    "NATIVE",
    "ConversionPlan",
    "ConvertibleModel",
    "DenseItem",
    "DenseShardPlan",
    "Planner",
    "known_format",
    "native_format",
    "plan_conversion",
    "plan_dense",
]

NATIVE: Final = "native"
MADE_DENSE: Final = (DenseFormat.F32, DenseFormat.BF16, DenseFormat.INT8)
"""Formats that any dense matrix can be converted to."""
_STORED: Final[dict[str, str]] = {
    "f32": "F32", "bf16": "BF16", "i8": "I8", "fp8": "F8_E4M3", "i64": "I64", "i32": "I32", "u8": "U8",
}  # fmt: skip
_OWN: Final[dict[str, DenseDtype]] = {"BF16": "bf16", FP8_DTYPE: "fp8", "I64": "i64", "I32": "i32", "U8": "u8"}
"""Types that are kept as they are where precision is kept; others widen to float32."""


class ConvertibleModel(Protocol):
    """What a plan needs to know of a model."""

    @property
    def family(self) -> str:
        """Its short name."""

    @property
    def experts(self) -> Sequence[RecordSource]:
        """Sources of all experts in flat order."""


@dataclass(frozen=True, slots=True)
class DenseItem:
    """One stored dense tensor: its name and type, and the source it is made from.

    `scales` names the scales that belong to codes; `scales_of` marks those scales themselves, by the codes' type.
    `source_scales` are those of the source, where it holds codes.
    """

    name: str
    stored: DenseDtype
    shape: tuple[int, ...]
    source: SourceTensor
    scales: str | None = None
    scales_of: DenseDtype | None = None
    source_scales: SourceTensor | None = None

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
        return {
            tensor.path for item in self.items for tensor in (item.source, item.source_scales) if tensor is not None
        }


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Everything that a conversion writes, apart from small files.

    Attributes:
        model: whose experts they are.
        geometry: of the store.
        expert_format: chosen, never "native"; where layers differ, of most experts.
        dense_format: chosen, never "native".
        dense: shards of dense tensors; written first, so that source shards become free as experts go on.
        experts: shards of expert records.
        remarks: what "native" came to, and the like.
        interface: how the model's own code finds its experts, where no family here knows them.
    """

    model: ConvertibleModel
    geometry: Geometry
    expert_format: ExpertFormat
    dense_format: DenseFormat
    dense: list[DenseShardPlan]
    experts: list[ExpertShardPlan]
    remarks: list[str]
    interface: Interface | None = None

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

    def expert_sources(self, plan: ExpertShardPlan) -> Sequence[RecordSource]:
        """Sources of a shard's experts."""
        return self.model.experts[plan.flats.start : plan.flats.stop]

    def source_files(self, plan: DenseShardPlan | ExpertShardPlan) -> set[Path]:
        """Source files that a shard is made from."""
        if isinstance(plan, DenseShardPlan):
            return plan.sources
        return {path for source in self.expert_sources(plan) for path in source.paths}


class Planner(Protocol):
    """Says what a checkpoint becomes."""

    def __call__(self, checkpoint: Checkpoint, *, experts: str, dense: str, shard_bytes: int) -> ConversionPlan:
        """See `plan_conversion`."""


def plan_conversion(checkpoint: Checkpoint, *, experts: str, dense: str, shard_bytes: int) -> ConversionPlan:
    """Chooses formats and cuts the output into shards.

    "native" is lossless: codes stay as they are published, layer by layer; bf16 where all plain tensors of the kind
    are bf16, else f32 (f16 and bf16 widen exactly).

    Raises:
        UsageError: unknown format.
        UnsupportedModel: the family, or one of its tensors, is not known.
        StoreDamaged: the checkpoint is incomplete or inconsistent.
    """
    known_format(experts, [NATIVE, *MADE_FORMATS], "--experts")
    known_format(dense, [NATIVE, *MADE_DENSE], "--dense")
    model = resolve(checkpoint)
    remarks: list[str] = []
    formats = _expert_formats(model, experts, remarks)
    dense_dtypes = {tensor.dtype for tensor, spec in model.dense.values() if not spec.keep_precision}
    chosen = native_format(dense, dense_dtypes - {FP8_DTYPE}, "dense tensors", remarks)
    coded = dense == NATIVE and FP8_DTYPE in dense_dtypes
    dense_format = DenseFormat.FP8 if coded else DenseFormat(chosen)
    geometry = _geometry(model, formats)
    weight = Counter[ExpertFormat]()
    for layer, count in model.shape.layers.items():
        weight[formats[layer]] += count
    return ConversionPlan(
        model,
        geometry,
        weight.most_common(1)[0][0],
        dense_format,
        plan_dense(model.dense, dense_format, shard_bytes, scales=model.dense_scales),
        plan_expert_shards(geometry, shard_bytes),
        remarks,
    )


def _expert_formats(model: ResolvedModel, wanted: str, remarks: list[str]) -> dict[int, ExpertFormat]:
    """The format of each layer's experts."""
    layers = model.shape.layers
    if wanted != NATIVE:
        return dict.fromkeys(layers, ExpertFormat(wanted))
    coded: dict[int, ExpertFormat] = {}
    plain: set[str] = set()
    start = 0
    for layer, count in layers.items():
        sources = model.experts[start : start + count]
        start += count
        coding = _coding_of(layer, sources)
        if coding.stored is not None:
            coded[layer] = coding.stored
        else:
            plain |= {matrix.tensor.dtype for source in sources for _, matrix in source}
    others = ExpertFormat(native_format(wanted, plain, "experts", remarks))
    if coded and len(coded) < len(layers):
        remarks.append(f"experts of {len(coded)} layers stay in codes, those of {len(layers) - len(coded)} in {others}")
    return {layer: coded.get(layer, others) for layer in layers}


def _coding_of(layer: int, sources: Sequence[ExpertSource]) -> Coding:
    codings = {matrix.coding for source in sources for _, matrix in source}
    if len(codings) > 1:
        raise UnsupportedModel(
            f"layer {layer}: its experts are published in different ways ({', '.join(sorted(codings))})",
            hint="A layer has records of one format: choose one with --experts, such as bf16 or int8.",
        )
    return codings.pop()


def _geometry(model: ResolvedModel, formats: Mapping[int, ExpertFormat]) -> Geometry:
    shape, mapping = model.shape, model.mapping
    layouts: dict[ExpertFormat, RecordLayout] = {}
    for chosen in formats.values():
        if chosen not in layouts:
            layouts[chosen] = expert_layout(
                chosen,
                shape.hidden_size,
                shape.intermediate_size,
                activation=mapping.activation,
                biases=mapping.expert_biases,
            )
    order = list(layouts)
    return Geometry(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        top_k=shape.top_k,
        vocab_size=shape.vocab_size,
        layers=tuple(
            ExpertLayer(layer=layer, experts=count, layout=order.index(formats[layer]))
            for layer, count in shape.layers.items()
        ),
        layouts=tuple(layouts.values()),
    )


def known_format(value: str, choices: Sequence[str], option: str) -> None:
    """UsageError, naming the option, unless the value is one of the choices."""
    if value not in choices:
        raise UsageError(f"{option} {value!r} is not known", hint=f"Choose one of: {', '.join(choices)}.")


def native_format(wanted: str, dtypes: set[str], kind: str, remarks: list[str]) -> str:
    """What "native" comes to for plain tensors of these types; anything else is what is wanted."""
    if wanted != NATIVE:
        return wanted
    if dtypes <= {"BF16"}:
        return "bf16"
    others = sorted(dtypes - {"F32"})
    if others:
        remarks.append(f"{kind}: {' and '.join(others)} widened to f32, which loses nothing")
    return "f32"


def plan_dense(
    sources: Mapping[str, tuple[SourceTensor, DenseSpec]],
    dense_format: DenseFormat,
    shard_bytes: int,
    *,
    scales: Mapping[str, SourceTensor] | None = None,
) -> list[DenseShardPlan]:
    """Cuts the dense tensors, in their order, into shards; a matrix and its scales stay together.

    Args:
        sources: source and specification by the name in the store.
        dense_format: of the matrices whose precision need not be kept.
        shard_bytes: most bytes of a shard with more than one tensor.
        scales: those of the sources that hold codes, by the same names.
    """
    known = scales or {}
    units = [_dense_unit(name, source, spec, dense_format, known.get(name)) for name, (source, spec) in sources.items()]
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


def _dense_unit(
    name: str, source: SourceTensor, spec: DenseSpec, dense_format: DenseFormat, scales: SourceTensor | None
) -> list[DenseItem]:
    """What is stored for one dense tensor: itself, or codes with their scales."""
    kept = spec.keep_precision or (dense_format is DenseFormat.INT8 and len(source.shape) != 2)
    match DenseFormat.FP8 if kept else dense_format:
        case DenseFormat.F32:
            stored: DenseDtype = "f32"
        case DenseFormat.BF16:
            stored = "bf16"
        case DenseFormat.INT8:
            stored = "i8"
        case DenseFormat.FP8:
            stored = _OWN.get(source.dtype, "f32")
    shape = scales_shape(stored, source.shape)
    if shape is None:
        return [DenseItem(name, stored, source.shape, source, source_scales=scales)]
    scales_name = f"{name}.scales"
    return [
        DenseItem(name, stored, source.shape, source, scales=scales_name, source_scales=scales),
        DenseItem(scales_name, "f32", shape, source, scales_of=stored, source_scales=scales),
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
