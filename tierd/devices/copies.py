"""Which files of a directory may serve as copies of a store's expert shards.

A file is admitted when it has the shard's length and header, and when the directory, if it says whose copy it is, says
that it is of this store. The bytes themselves are checked against the index with every read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierd.errors import StoreDamaged, TierdError
from tierd.store.manifest import MANIFEST_FILE, read_manifest
from tierd.store.store import check_shard

if TYPE_CHECKING:
    from tierd.store.manifest import Shard
    from tierd.store.store import ExpertStore

__all__ = ["Copy", "admit_copy"]


@dataclass(frozen=True, slots=True)
class Copy:
    """A directory with copies of some or all expert shards.

    Attributes:
        directory: as given.
        paths: one per shard of the store, in the index's order; None where there is no good copy.
        left_out: why files were not admitted; each names the file and the one it should equal.
    """

    directory: Path
    paths: list[Path | None]
    left_out: list[str]

    @property
    def shards(self) -> list[int]:
        """Numbers of the shards that are there."""
        return [number for number, path in enumerate(self.paths) if path is not None]


def admit_copy(store: ExpertStore, directory: Path) -> Copy:
    """Look at every shard file of a directory. Files that are not there are no problem: copies may be partial."""
    shards, originals = store.manifest.shards, store.shard_paths
    nothing: list[Path | None] = [None] * len(shards)
    if not directory.is_dir():
        return Copy(directory, nothing, [f"{directory} is not a directory"])
    foreign = _foreign(store, directory)
    if foreign:
        return Copy(directory, nothing, [foreign])
    paths, left_out = nothing, []
    for number, (shard, original) in enumerate(zip(shards, originals, strict=True)):
        path = directory / shard.file
        if not os.path.lexists(path):
            continue
        problem = _problem(path, original, shard)
        if problem:
            left_out.append(problem)
        else:
            paths[number] = path
    return Copy(directory, paths, left_out)


def _foreign(store: ExpertStore, directory: Path) -> str:
    """What is wrong with the directory's own manifest, if it has one."""
    theirs, ours = directory / MANIFEST_FILE, store.path / MANIFEST_FILE
    if not theirs.exists():
        return ""
    try:
        fingerprint = read_manifest(theirs).fingerprint
    except TierdError as error:
        return f"{theirs} is not the manifest {ours}: {error.message}"
    if fingerprint != store.fingerprint:
        return f"{theirs} is of another store ({fingerprint[:12]}) than {ours} ({store.fingerprint[:12]})"
    return ""


def _problem(path: Path, original: Path, shard: Shard) -> str:
    try:
        if path != original and original.exists() and path.samefile(original):
            return f"{path} is the same file as {original}, not a copy"
        check_shard(path, shard)
    except StoreDamaged as error:
        return f"{path} is no copy of {original}: {error.message}"
    except OSError as error:
        return f"{path} is no copy of {original}: {error.strerror}"
    return ""
