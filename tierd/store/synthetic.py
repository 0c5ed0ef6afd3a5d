"""Stores of any geometry without a checkpoint: random weights, a byte pattern, or sparse files of zeros.

They serve tests and measurements. A "pattern" store derives every byte from (layer, expert, position), so that a
byte from a wrong place shows; a "sparse" store of a real model's size takes almost no space.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierd.errors import UsageError
from tierd.store.checksums import sha256, xxh3
from tierd.store.formats import Activation, DenseFormat, ExpertFormat
from tierd.store.geometry import ExpertLayer, Geometry
from tierd.store.index import new_index
from tierd.store.manifest import CONFIG_FILE, DenseTensorInfo, Manifest, Shard, StoredFile
from tierd.store.records import PART_ALIGNMENT, RecordLayout, expert_layout
from tierd.store.shards import encode_header
from tierd.store.store import ExpertStore
from tierd.store.writing import (
    DEFAULT_SHARD_BYTES,
    ShardWriter,
    plan_expert_shards,
    seal_store,
    shard_entry,
    write_atomic,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["FILLS", "expected_record", "fill_scales", "finite_fp8", "make_store"]

FILLS: Final = ("random", "pattern", "sparse")
DENSE_SHARD: Final = "dense-00001.safetensors"
_DENSE_KINDS: Final = {"float32": ("f32", "F32"), "uint16": ("bf16", "BF16")}


def make_store(
    path: Path | str,
    *,
    layers: int | Sequence[int],
    experts: int | Sequence[int],
    top_k: int,
    hidden: int = 64,
    intermediate: int = 32,
    format: ExpertFormat | str | Sequence[ExpertFormat | str] = "bf16",  # noqa: A002  the field's word, by name
    activation: Activation | str = Activation.SILU,
    biases: bool = False,
    seed: int = 0,
    fill: str = "random",
    record_bytes: int | Sequence[int] | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    dense: Mapping[str, np.ndarray] | None = None,
    config: Mapping[str, Any] | None = None,
    wrote: Callable[[int, int], None] = lambda _done, _all: None,
) -> ExpertStore:
    """Writes a store and opens it.

    Args:
        path: a directory that does not exist or is empty.
        layers: number of layers with routed experts (0, 1, …), or their layer numbers in rising order.
        experts: experts per layer, or one number for each layer.
        top_k: experts chosen per token.
        hidden: H.
        intermediate: I.
        format: of the experts, or one for each layer.
        activation: of the experts.
        biases: experts have biases of gate, up and down.
        seed: of the random weights.
        fill: "random" (finite weights of standard deviation H^-0.5), "pattern" or "sparse".
        record_bytes: length of a record, or one for each layer; default: the smallest that fits.
        shard_bytes: records per shard, in bytes.
        dense: dense tensors by name: float32, or uint16 for the bits of bf16.
        config: content of config.json.
        wrote: told after each expert how many are written, and of how many.

    Raises:
        UsageError: an argument does not fit, or the directory is not empty.
    """
    root = Path(path)
    if fill not in FILLS:
        raise UsageError(f"unknown fill {fill!r}", hint=f"Known: {', '.join(FILLS)}.")
    formats = [ExpertFormat(name) for name in ([format] if isinstance(format, str) else format)]

    def layout(number: int, size: int | None) -> RecordLayout:
        wanted = formats[number if len(formats) > 1 else 0]
        return expert_layout(wanted, hidden, intermediate, record_bytes=size, activation=activation, biases=biases)

    geometry = _geometry(layers, experts, top_k, (hidden, intermediate), layout, record_bytes)
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        raise UsageError(f"{root} is not empty")
    index = new_index(geometry)
    plans = plan_expert_shards(geometry, shard_bytes)
    for number, plan in enumerate(plans):
        index["shard"][plan.flats.start : plan.flats.stop] = number
        index["offset"][plan.flats.start : plan.flats.stop] = [entry.begin for entry in plan.header.tensors.values()]
    if fill == "sparse":
        for entry in geometry.layers:
            zeros = xxh3(np.zeros(geometry.layouts[entry.layout].record_bytes, dtype=np.uint8))
            start = geometry.layer_start(entry.layer)
            index["xxh3"][start : start + entry.experts] = zeros
    for plan in plans:
        with ShardWriter(root / plan.file, plan.header) as writer:
            if fill == "sparse":
                writer.skip_to_end()
            else:
                for flat in plan.flats:
                    record = _record(geometry, flat, fill, seed)
                    index["xxh3"][flat] = xxh3(record)
                    writer.write(record)
                    wrote(flat + 1, geometry.experts_total)
            writer.commit()
    infos, shards = _write_dense(root, dense or {})
    seal_store(
        root,
        family="",
        model_type=str((config or {}).get("model_type", "")),
        expert_format=max(formats, key=formats.count),
        dense_format=DenseFormat.BF16 if all(i.dtype == "bf16" for i in infos) and infos else DenseFormat.F32,
        geometry=geometry,
        shards=[plan.shard for plan in plans],
        index=index,
        dense_shards=shards,
        dense=infos,
        files=[] if config is None else [_write_config(root, config)],
    )
    return ExpertStore.open(root)


def _write_config(root: Path, config: Mapping[str, Any]) -> StoredFile:
    text = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    write_atomic(root / CONFIG_FILE, text)
    return StoredFile(name=CONFIG_FILE, bytes=len(text), sha256=sha256(text))


def expected_record(manifest: Manifest, layer: int, expert: int) -> bytes:
    """The bytes of an expert's record in a store that was made with fill="pattern".

    Eight bytes at a time: a multiplicative hash of (layer, expert, position).
    """
    nbytes = manifest.geometry.layout(layer).record_bytes
    manifest.geometry.flat(layer, expert)
    return _pattern(layer, expert, nbytes).tobytes()


def _pattern(layer: int, expert: int, nbytes: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        words = np.arange(nbytes // 8, dtype=np.uint64)
        words += np.uint64((layer + 1) << 44 | (expert + 1) << 24)
        words *= np.uint64(0x9E3779B97F4A7C15)
        words ^= words >> np.uint64(29)
        words *= np.uint64(0xBF58476D1CE4E5B9)
        words ^= words >> np.uint64(32)
    return words.view(np.uint8)


def _record(geometry: Geometry, flat: int, fill: str, seed: int) -> np.ndarray:
    layer, expert = geometry.locate(flat)
    layout = geometry.layout(layer)
    if fill == "pattern":
        return _pattern(layer, expert, layout.record_bytes)
    record = np.zeros(layout.record_bytes, dtype=np.uint8)
    generator = np.random.Generator(np.random.Philox(key=[seed, flat]))
    scale = np.float32(geometry.hidden_size**-0.5)
    for name, view in layout.views(record).items():
        if name.endswith(".scales"):
            fill_scales(view, scale, ExpertFormat(layout.format), generator)
        elif view.dtype == np.float32:
            view[...] = scale * generator.standard_normal(view.shape, dtype=np.float32)
        elif view.dtype == np.uint16:
            weights = scale * generator.standard_normal(view.shape, dtype=np.float32)
            view[...] = weights.view(np.uint32) >> 16
        elif view.dtype == np.int8:
            view[...] = generator.integers(-127, 128, view.shape, dtype=np.int8)
        else:
            view[...] = generator.integers(0, 256, view.shape, dtype=np.uint8)
            if layout.format == ExpertFormat.FP8:
                finite_fp8(view)
    return record


_CODE_SPREAD: Final = {
    ExpertFormat.INT8: 127 / 3,
    ExpertFormat.INT4_G64: 8 / 3,
    ExpertFormat.FP8: 64.0,
    ExpertFormat.MXFP4: 2.0,
    ExpertFormat.INT4_G32: 8 / 3,
}
"""About the standard deviation of what random codes mean."""


def fill_scales(
    view: np.ndarray, spread: np.floating, expert_format: ExpertFormat, generator: np.random.Generator
) -> None:
    """Random scales under which random codes are weights of about this standard deviation."""
    scales = spread / _CODE_SPREAD[expert_format] * generator.uniform(0.5, 1.5, view.shape)
    bits = scales.astype(np.float32).view(np.uint32)
    if view.dtype == np.uint8:
        view[...] = bits >> 23
    elif view.dtype == np.uint16:
        view[...] = bits >> 16
    else:
        view[...] = scales


def finite_fp8(codes: np.ndarray) -> None:
    """Replaces the two codes of e4m3 that are no number by their neighbours, in place."""
    codes[(codes & 0x7F) == 0x7F] ^= 1


def _geometry(
    layers: int | Sequence[int],
    experts: int | Sequence[int],
    top_k: int,
    sizes: tuple[int, int],
    layout_of: Callable[[int, int | None], RecordLayout],
    record_bytes: int | Sequence[int] | None,
) -> Geometry:
    numbers = list(range(layers)) if isinstance(layers, int) else list(layers)
    counts = [experts] * len(numbers) if isinstance(experts, int) else list(experts)
    lengths: list[int | None] = (
        [record_bytes] * len(numbers) if record_bytes is None or isinstance(record_bytes, int) else list(record_bytes)
    )
    if not len(numbers) == len(counts) == len(lengths):
        raise UsageError(f"{len(numbers)} layers, but {len(counts)} expert counts and {len(lengths)} sizes")
    layouts: list[RecordLayout] = []
    entries: list[ExpertLayer] = []
    for number, (layer, count, length) in enumerate(zip(numbers, counts, lengths, strict=True)):
        layout = layout_of(number, length)
        if layout not in layouts:
            layouts.append(layout)
        entries.append(ExpertLayer(layer=layer, experts=count, layout=layouts.index(layout)))
    return Geometry(
        hidden_size=sizes[0],
        intermediate_size=sizes[1],
        top_k=top_k,
        layers=tuple(entries),
        layouts=tuple(layouts),
    )


def _write_dense(root: Path, dense: Mapping[str, np.ndarray]) -> tuple[list[DenseTensorInfo], list[Shard]]:
    if not dense:
        return [], []
    arrays = {name: np.ascontiguousarray(array) for name, array in dense.items()}
    for name, array in arrays.items():
        if str(array.dtype) not in _DENSE_KINDS:
            raise UsageError(f"dense tensor {name} of type {array.dtype}; float32 or uint16 is wanted")
    header = encode_header(
        ((name, _DENSE_KINDS[str(array.dtype)][1], array.shape) for name, array in arrays.items()),
        alignment=PART_ALIGNMENT,
    )
    infos = []
    with ShardWriter(root / DENSE_SHARD, header) as writer:
        for name, array in arrays.items():
            writer.write(array)
            entry = header.tensors[name]
            infos.append(
                DenseTensorInfo(
                    name=name,
                    dtype="f32" if array.dtype == np.float32 else "bf16",
                    shape=array.shape,
                    shard=0,
                    offset=entry.begin,
                    nbytes=entry.nbytes,
                    xxh3=f"{xxh3(array):016x}",
                )
            )
        writer.commit()
    return infos, [shard_entry(DENSE_SHARD, header)]
