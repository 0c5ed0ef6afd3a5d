"""The destination of a conversion: may it be written, what is complete in it, and is there room for the rest."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from tierd.checkpoint.journal import Identity, is_leftover, read_identity
from tierd.checkpoint.source import SourceRelease
from tierd.errors import LimitExceeded, UsageError
from tierd.store.manifest import MANIFEST_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from tierd.checkpoint.plan import ConversionPlan, DenseShardPlan
    from tierd.store.writing import ExpertShardPlan

__all__ = ["begun_conversion", "check_space", "is_complete"]

SLACK_BYTES: Final = 16 << 20
"""For index, manifest, journal and small files."""


def begun_conversion(target: Path) -> Identity | None:
    """The identity of the conversion that began in `target`; None for a new or empty directory.

    Raises:
        UsageError: it holds anything else.
    """
    if not target.exists():
        return None
    if not target.is_dir():
        raise UsageError(f"{target} is not a directory")
    identity = read_identity(target)
    if identity is not None:
        return identity
    names = sorted(path.name for path in target.iterdir() if not is_leftover(path.name))
    if MANIFEST_FILE in names:
        raise UsageError(f"{target} already holds a store", hint="Choose another destination, or remove it first.")
    if names:
        raise UsageError(
            f"{target} is not empty (it has {names[0]}) and holds no conversion that could go on",
            hint="Choose an empty or new directory.",
        )
    return None


def is_complete(target: Path, shard: DenseShardPlan | ExpertShardPlan) -> bool:
    """True if the shard is there with its planned length and header."""
    path = target / shard.file
    if not path.exists() or path.stat().st_size != shard.header.file_bytes:
        return False
    with path.open("rb") as file:
        return file.read(shard.header.header_bytes) == shard.header.raw


def check_space(
    plan: ConversionPlan, target: Path, finished: set[str], *, consume: bool, next_only: bool = False
) -> None:
    """Refuses to go on when the shards still to be written do not fit on the destination's drive.

    Args:
        plan: of the conversion.
        target: the destination, or where it will be.
        finished: names of complete shards.
        consume: count the source shards that are freed as the conversion goes on (same drive only).
        next_only: look only at the next shard.

    Raises:
        LimitExceeded: says how much is needed, how much there is, and what would help.
    """
    place = target
    while not place.exists():
        place = place.parent
    drive = os.statvfs(place)
    free = drive.f_bavail * drive.f_frsize
    device = place.stat().st_dev
    release = SourceRelease(plan, finished)
    held = peak = SLACK_BYTES
    for shard in plan.shards:
        if shard.file in finished:
            continue
        held += shard.header.file_bytes
        peak = max(peak, held)
        if next_only:
            break
        freed = release.freed_by(shard.file) if consume else []
        held -= sum(path.stat().st_size for path in freed if path.exists() and path.stat().st_dev == device)
        release.finish(shard.file)
    if peak > free:
        hint = "Free some space and run the same command again: it goes on where it stopped."
        if not consume:
            hint += " With --consume, source shards are freed as they are converted."
        raise LimitExceeded(
            f"{place}: {(peak - free) / 1e9:.2f} GB short: the conversion needs {peak / 1e9:.2f} GB more, "
            f"{free / 1e9:.2f} GB are free",
            hint=hint,
        )
