"""Which files of a store go to a mirror, and in which order: pure, from sizes, usage counts and a budget.

A mirror holds whole files. The shards with the most uses per byte come first, so that a mirror that is stopped early,
or that has room for a part only, helps most where it is asked most.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from tierd.errors import UsageError
from tierd.store.manifest import MANIFEST_FILE, Manifest

__all__ = ["FileKind", "MirrorFile", "MirrorPlan", "mirror_files", "plan_mirror"]


class FileKind(StrEnum):
    """What a file of a store holds."""

    EXPERTS = "experts"
    DENSE = "dense"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class MirrorFile:
    """A file of the store.

    Attributes:
        name: the same in store and mirror.
        nbytes: length; for `store.json`, whose length is written nowhere, 0.
        kind: what it holds.
        uses: how often its experts were used, as far as is known.
    """

    name: str
    nbytes: int
    kind: FileKind
    uses: float = 0.0


@dataclass(frozen=True, slots=True)
class MirrorPlan:
    """What to copy.

    Attributes:
        files: in the order of copying.
        left_out: what does not fit, in the same order.
        budget: bytes that the mirror may take; None without a bound.
        room: bytes that the drive has for it.
    """

    files: tuple[MirrorFile, ...]
    left_out: tuple[MirrorFile, ...]
    budget: int | None
    room: int
    _names: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_names", frozenset(file.name for file in self.files))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @property
    def nbytes(self) -> int:
        """Bytes of the planned files."""
        return sum(file.nbytes for file in self.files)

    @property
    def partial(self) -> bool:
        """True if some experts stay on the primary alone."""
        return any(file.kind is FileKind.EXPERTS for file in self.left_out)

    @property
    def share_of_uses(self) -> float | None:
        """Share of the known uses that the mirror can serve; None where nothing is known."""
        total = sum(file.uses for file in (*self.files, *self.left_out))
        return sum(file.uses for file in self.files) / total if total else None


def mirror_files(manifest: Manifest, index: np.ndarray, uses: np.ndarray | None = None) -> list[MirrorFile]:
    """All files of a store in the order in which a mirror wants them.

    Small files first, then expert shards from the most to the fewest uses per byte (as they are numbered where nothing
    is known), then dense shards.

    Args:
        manifest: of the store.
        index: [experts_total] of `INDEX_DTYPE`.
        uses: [experts_total], how often each expert was used; None where nothing is known.

    Raises:
        UsageError: `uses` does not fit the store.
    """
    if uses is None:
        uses = np.zeros(len(index))
    if uses.shape != (len(index),) or not np.isfinite(uses).all() or (uses < 0).any():
        raise UsageError(
            f"the usage history is no list of {len(index)} counts, one for each expert of the store",
            hint="Give the history that was recorded with this store, or leave it out.",
        )
    heat = np.bincount(index["shard"].astype(np.int64), weights=uses, minlength=len(manifest.shards))
    experts = [
        MirrorFile(shard.file, shard.bytes, FileKind.EXPERTS, float(count))
        for shard, count in zip(manifest.shards, heat, strict=True)
    ]
    experts.sort(key=lambda file: -file.uses / max(file.nbytes, 1))
    texts = [MirrorFile(file.name, file.bytes, FileKind.TEXT) for file in (*manifest.files, manifest.index)]
    dense = [MirrorFile(shard.file, shard.bytes, FileKind.DENSE) for shard in manifest.dense_shards]
    return [*texts, MirrorFile(MANIFEST_FILE, 0, FileKind.TEXT), *experts, *dense]


def plan_mirror(files: list[MirrorFile], *, budget: int | None, room: int) -> MirrorPlan:
    """Takes each file that still fits, in order; a smaller one may fit where a larger one did not.

    Args:
        files: from `mirror_files`.
        budget: bytes that the mirror may take; None without a bound.
        room: bytes that the drive has for it, what is there already included.
    """
    left = room if budget is None else min(room, budget)
    taken, left_out = [], []
    for file in files:
        if file.nbytes <= left:
            left -= file.nbytes
            taken.append(file)
        else:
            left_out.append(file)
    return MirrorPlan(tuple(taken), tuple(left_out), budget, room)
