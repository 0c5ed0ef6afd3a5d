"""`store.json`: what a store holds, and the fingerprint over everything that decides a token."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tierd.errors import StoreDamaged, UsageError
from tierd.store.checksums import sha256
from tierd.store.formats import MADE_FORMATS, Activation, DenseFormat, ExpertFormat
from tierd.store.geometry import Geometry, Size
from tierd.store.reading import read_small_file
from tierd.store.records import expert_layout

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = [
    "CONFIG_FILE",
    "FORMAT_VERSION",
    "INDEX_FILE",
    "MANIFEST_FILE",
    "DenseDtype",
    "DenseTensorInfo",
    "Interface",
    "InterfaceModule",
    "Manifest",
    "Shard",
    "StoredFile",
    "compute_fingerprint",
    "parse_manifest",
    "read_manifest",
    "version_needed",
]

FORMAT_VERSION: Final = 2
"""The newest layout on disk that is read and written; a store says the oldest one that can express it.

1: experts of one format among f32, bf16, int8 and int4-g64, with silu; dense tensors in f32, bf16 or i8.
2: also fp8-e4m3, mxfp4 and int4-g32, formats that differ by layer, biases of experts, `activation` in a record
layout, dense tensors in fp8; `interface`, experts without a gate and with sizes that differ by layer, tables of whole
numbers.
"""
MANIFEST_FILE: Final = "store.json"
INDEX_FILE: Final = "experts.npy"
CONFIG_FILE: Final = "config.json"
MAX_MANIFEST_BYTES: Final = 64 << 20
MAX_TEXT_BYTES: Final = 128 << 20

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
DenseDtype = Literal["f32", "bf16", "i8", "fp8", "i64", "i32", "u8"]
Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(_Model):
    """One safetensors file of the store.

    Attributes:
        file: its name inside the store.
        bytes: its length.
        header_bytes: where its data begins.
        header_sha256: of those first bytes, so that opening a store need not parse them.
    """

    file: FileName
    bytes: Count
    header_bytes: Count
    header_sha256: Digest


class DenseTensorInfo(_Model):
    """Where a dense tensor lies; `offset` counts from the start of the file.

    Attributes:
        name: the checkpoint's own tensor name; row scales are called NAME.scales.
        dtype: "f32", "bf16", "i8" or "fp8"; "i64", "i32" or "u8" for tables of whole numbers.
        shape: as in the checkpoint; empty for a single number.
        shard: index into `Manifest.dense_shards`.
        offset: bytes from the start of that file.
        nbytes: length.
        xxh3: 16 hex digits.
        scales: name of the float32 tensor that belongs to codes: [rows] of "i8", one per 128 x 128 of "fp8".
    """

    name: Annotated[str, Field(min_length=1, max_length=512)]
    dtype: DenseDtype
    shape: Annotated[tuple[Size, ...], Field(max_length=16)]
    shard: Count
    offset: Count
    nbytes: Count
    xxh3: Checksum
    scales: str | None = None


class StoredFile(_Model):
    """A small file that belongs to the store: config, tokenizer, chat template, index."""

    name: FileName
    bytes: Annotated[int, Field(ge=0, le=MAX_TEXT_BYTES)]
    sha256: Digest


class InterfaceModule(_Model):
    """A module of a model whose routed experts are a layer of the store.

    Attributes:
        layer: its number in the store's geometry.
        path: its name inside the model.
        has_gate: gate and up projection are joined by the module's own function.
        has_bias: the projections have biases.
    """

    layer: Annotated[int, Field(ge=0, le=1 << 16)]
    path: Annotated[str, Field(min_length=1, max_length=512)]
    has_gate: bool
    has_bias: bool


class Interface(_Model):
    """Of stores that only the model's own code can run, through the experts interface of transformers.

    Attributes:
        architecture: name of the model's class.
        transformers: version by which the checkpoint was read.
        modules: with routed experts, in the order of their layers.
    """

    architecture: Annotated[str, Field(min_length=1, max_length=256)]
    transformers: Annotated[str, Field(min_length=1, max_length=64)]
    modules: tuple[InterfaceModule, ...]


class Manifest(_Model):
    """The content of `store.json`.

    Attributes:
        format_version: of the layout on disk, see `FORMAT_VERSION`.
        family: name of the family mapping, "" for synthetic stores.
        model_type: as in config.json.
        expert_format: of the routed experts; where layers differ, of most of them.
        dense_format: of the dense matrices; single tensors may keep more precision, see `dense`.
        geometry: layers, experts, record layouts.
        shards: of expert records, in the order that the index counts.
        dense_shards: of dense tensors.
        dense: every dense tensor.
        index: the file `experts.npy`.
        files: small text files copied beside the weights.
        interface: how the model's own code finds its experts; None for families that are known here.
        fingerprint: see `compute_fingerprint`.
    """

    format_version: Literal[1, 2]
    family: Annotated[str, Field(max_length=64)]
    model_type: Annotated[str, Field(max_length=64)]
    expert_format: ExpertFormat
    dense_format: DenseFormat
    geometry: Geometry
    shards: tuple[Shard, ...]
    dense_shards: tuple[Shard, ...]
    dense: tuple[DenseTensorInfo, ...]
    index: StoredFile
    files: tuple[StoredFile, ...]
    interface: Interface | None = None
    fingerprint: Digest

    @property
    def dense_bytes(self) -> int:
        """Bytes of all dense tensors."""
        return sum(info.nbytes for info in self.dense)

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards and small files of the store."""
        shards = sum(shard.bytes for shard in (*self.shards, *self.dense_shards))
        return shards + self.index.bytes + sum(file.bytes for file in self.files)

    def to_json(self) -> str:
        """The text of `store.json`."""
        return json.dumps(self.to_table(), indent=1) + "\n"

    def to_table(self) -> dict[str, Any]:
        """The content of `store.json`, with the fields of its format version."""
        table = self.model_dump(mode="json")
        if self.interface is None:
            del table["interface"]
        if self.format_version == 1:
            for layout in table["geometry"]["layouts"]:
                del layout["activation"]
        return table


def compute_fingerprint(manifest: Manifest) -> str:
    """SHA-256 over everything that decides a token, as 64 hex digits.

    Family, formats, geometry, record layouts, shard sizes and headers, the index (and so every record's checksum),
    the checksum of every dense tensor, and config.json. Tokenizer and chat template are not part of it.
    """
    facts = manifest.to_table()
    del facts["fingerprint"], facts["files"]
    facts["config"] = [file.sha256 for file in manifest.files if file.name == CONFIG_FILE]
    return sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(path: Path) -> Manifest:
    """Reads and checks `store.json` by itself (not against the other files).

    Raises:
        StoreDamaged: the file is missing, no JSON, or a field does not fit; the field is named.
        UsageError: another format version.
    """
    return parse_manifest(read_small_file(path, MAX_MANIFEST_BYTES), str(path))


def parse_manifest(text: bytes | str, path: str) -> Manifest:
    """Checks the text of a `store.json`; `path` names its origin in messages. Raises like `read_manifest`."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreDamaged(f"{path} is not JSON: {str(error)[:200]}") from None
    version = table.get("format_version") if isinstance(table, dict) else None
    if isinstance(version, int) and not 1 <= version <= FORMAT_VERSION:
        raise UsageError(
            f"{path}: store format {version}; this version of tierd reads formats 1 to {FORMAT_VERSION}",
            hint="Use the version of tierd that wrote it, or convert the checkpoint again.",
        )
    try:
        manifest = Manifest.model_validate(table)
        _check_layouts(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(step) for step in first["loc"])
        raise StoreDamaged(f"{path}: {field or 'content'}: {first['msg']}") from None
    except StoreDamaged as error:
        raise StoreDamaged(f"{path}: {error.message}") from None
    if compute_fingerprint(manifest) != manifest.fingerprint:
        raise StoreDamaged(
            f"{path}: the fingerprint does not match the content",
            hint="The file was changed after conversion; restore it or convert again.",
        )
    return manifest


def version_needed(
    geometry: Geometry, dense: Iterable[DenseTensorInfo], interface: Interface | None = None
) -> Literal[1, 2]:
    """The oldest format version that can express a store, so that older programs can read what they understand."""
    layouts = geometry.layouts
    plain = len({layout.format for layout in layouts}) == 1 and all(
        layout.format in MADE_FORMATS and layout.activation == Activation.SILU and not layout.biases
        for layout in layouts
    )
    old = all(info.dtype in ("f32", "bf16", "i8") and info.shape for info in dense)
    return 1 if plain and old and interface is None else 2


def _check_layouts(manifest: Manifest) -> None:
    """Kernels read records by format and sizes: a layout that says anything else would be read wrongly."""
    geometry = manifest.geometry
    formats = {layout.format for layout in geometry.layouts}
    if manifest.expert_format not in formats or (manifest.format_version == 1 and len(formats) > 1):
        raise StoreDamaged(f"a record layout differs from the one of format {manifest.expert_format}")
    for layout in geometry.layouts:
        if layout.format not in tuple(ExpertFormat):
            raise StoreDamaged(f"a record layout has the unknown format {layout.format[:40]!r}")
        own = manifest.interface is not None
        if own != (layout.activation == Activation.MODEL):
            raise StoreDamaged(f"a record layout has the activation {layout.activation}, which does not fit its store")
        if own and not {"up", "down"} <= {part.name for part in layout.parts}:
            raise StoreDamaged("a record layout lacks a matrix")
        hidden, width = layout.sizes if own else (geometry.hidden_size, geometry.intermediate_size)
        expected = expert_layout(
            layout.format,
            hidden,
            width,
            activation=layout.activation,
            biases=layout.biases,
            gated=layout.gated or not own,
        )
        if layout.parts != expected.parts or layout.record_bytes < expected.record_bytes:
            raise StoreDamaged(f"a record layout differs from the one of format {layout.format}")
    if manifest.format_version < version_needed(geometry, manifest.dense, manifest.interface):
        raise StoreDamaged(f"what it describes cannot be in format_version {manifest.format_version}")
