"""Reading a published checkpoint: a Hugging Face folder of safetensors files, checked before anything is used."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tierd.checkpoint.config import Config
from tierd.checkpoint.names import canonical_name
from tierd.checkpoint.registry import known_family
from tierd.errors import StoreDamaged, UsageError
from tierd.store.reading import read_small_file
from tierd.store.shards import ShardHeader, read_header

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Checkpoint", "SourceTensor", "missing_tensors", "unfinished_downloads"]

INDEX_NAME: Final = "model.safetensors.index.json"
MAX_INDEX_BYTES: Final = 256 << 20
UNFINISHED: Final = (".incomplete", ".part", ".partial", ".aria2", ".crdownload", ".tmp")
_NUMBERED: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of the checkpoint: where its bytes are; `offset` counts from the start of the file.

    `name` is the published one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint: headers read and checked, no weight touched yet.

    Attributes:
        folder: where it lies.
        config: its config.json.
        headers: of the shards, by file name in sorted order.
        tensors: all tensors, by canonical name.
        remarks: what a person should know, though it stops nothing.
    """

    folder: Path
    config: Config
    headers: dict[str, ShardHeader]
    tensors: dict[str, SourceTensor]
    remarks: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Finds the shards, with or without an index file, and checks every header against its file.

        Raises:
            UsageError: no checkpoint, or only formats other than safetensors.
            StoreDamaged: a file is missing, dangling, short, or inconsistent; it is named.
        """
        root = Path(folder)
        if not root.is_dir():
            raise UsageError(f"{root} is not a directory", hint="Give a folder with config.json and safetensors files.")
        config = Config.read(root)
        listed = _read_index(root)
        names = sorted(set(listed.values())) if listed else _shard_names(root)
        headers = {name: _read_shard(root, name, names) for name in names}
        return cls.from_headers(root, config, headers, listed)

    @classmethod
    def from_headers(
        cls,
        folder: Path,
        config: Config,
        headers: dict[str, ShardHeader],
        listed: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """A checkpoint whose headers are known, e.g. from the journal of a conversion that goes on.

        Tensors of a known family get the names that its text model has alone; those of other towers are left out.
        """
        tensors: dict[str, SourceTensor] = {}
        family = known_family(config)
        towers = family.towers if family is not None and config.composite else ()
        left_out = 0
        for file, header in headers.items():
            for entry in header.tensors.values():
                if entry.name.startswith(towers):
                    left_out += 1
                    continue
                name = entry.name if family is None else canonical_name(entry.name)
                other = tensors.get(name)
                if other is not None:
                    raise StoreDamaged(
                        f"{folder / file}: tensor {entry.name} is also in {other.path.name}, as {other.name}",
                        hint="A folder must hold one copy of a model; remove the files of the other one.",
                    )
                tensors[name] = SourceTensor(
                    entry.name, entry.dtype, entry.shape, folder / file, entry.begin, entry.nbytes
                )
        lost = [name for name, file in (listed or {}).items() if name not in headers[file].tensors]
        if lost:
            raise missing_tensors(folder, lost, len(tensors), len(headers))
        unfinished = unfinished_downloads(folder)
        remarks = [f"unfinished download left in the folder: {name}" for name in unfinished]
        if left_out:
            remarks.append(f"{left_out} tensors of vision and other towers are left out: only text is converted")
        return cls(folder, config, headers, tensors, remarks)


def missing_tensors(folder: Path, names: list[str], tensors: int, files: int) -> StoreDamaged:
    """The error for tensors that should be there: how much was found, what is missing, and the likely cause."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    unfinished = unfinished_downloads(folder)
    cause = (
        f"Unfinished downloads lie in the folder ({', '.join(unfinished[:3])}): finish them first."
        if unfinished
        else "This looks like an incomplete download: compare the list of files with the published one."
    )
    return StoreDamaged(
        f"{folder}: indexed {tensors} tensors from {files} files, {len(names)} missing: {shown}", hint=cause
    )


def unfinished_downloads(folder: Path) -> list[str]:
    """Names of files that download tools leave while they work, in the folder or beside its link targets."""
    places = [folder, folder / ".cache" / "huggingface" / "download"]
    if folder.parent.name == "snapshots":  # a Hugging Face cache: files are links into ../../blobs
        places.append(folder.parent.parent / "blobs")
    return sorted(
        str(path.relative_to(place))
        for place in places
        if place.is_dir()
        for path in place.iterdir()
        if path.name.endswith(UNFINISHED)
    )


def _read_index(root: Path) -> dict[str, str]:
    """Tensor name to file name of `model.safetensors.index.json`; empty if there is none."""
    path = root / INDEX_NAME
    if not path.exists():
        if path.is_symlink():
            raise _dangling(path)
        return {}
    try:
        table = json.loads(read_small_file(path, MAX_INDEX_BYTES))
    except (ValueError, RecursionError) as error:
        raise StoreDamaged(f"{path} is not JSON: {str(error)[:200]}") from None
    listed = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise StoreDamaged(f"{path}: weight_map is missing")
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise StoreDamaged(f"{path}: tensor {name[:200]}: {str(file)[:200]!r} is not a file name")
    return listed


def _shard_names(root: Path) -> list[str]:
    """The shards of a folder without an index file."""
    found = sorted(path.name for path in root.iterdir() if path.name.endswith(".safetensors"))
    names = [name for name in found if name.startswith("model")] or [
        name for name in found if not name.startswith("consolidated")
    ]
    if not names:
        unfinished = unfinished_downloads(root)
        other = sorted(path.name for path in root.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".gguf"})
        hint = f"The folder has {other[0]}: only safetensors files are read." if other else ""
        if unfinished:
            hint = f"An unfinished download lies there: {', '.join(unfinished[:3])}."
        raise UsageError(f"{root}: no safetensors files", hint=hint)
    groups = {match[1]: int(match[3]) for name in names if (match := _NUMBERED.fullmatch(name))}
    for prefix, total in groups.items():
        wanted = [f"{prefix}-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
        lost = [name for name in wanted if name not in names]
        if lost:
            raise _missing_files(root, lost, len(names))
    return names


def _read_shard(root: Path, name: str, names: list[str]) -> ShardHeader:
    path = root / name
    if path.exists():
        return read_header(path)
    if path.is_symlink():
        raise _dangling(path)
    raise _missing_files(root, [other for other in names if not (root / other).exists()], len(names))


def _missing_files(root: Path, lost: list[str], known: int) -> StoreDamaged:
    shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
    unfinished = unfinished_downloads(root)
    cause = f" (unfinished: {', '.join(unfinished[:3])})" if unfinished else ""
    return StoreDamaged(
        f"{root}: {len(lost)} of the checkpoint's shards are missing: {shown}; {known} are named or present",
        hint=f"This looks like an incomplete download{cause}: download the missing files.",
    )


def _dangling(path: Path) -> StoreDamaged:
    return StoreDamaged(
        f"{path} is a link to {path.readlink()}, which does not exist",
        hint="Copy the folder with its link targets (cp -rL), or download it again.",
    )
