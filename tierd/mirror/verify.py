"""Checking a mirror: what is there, what is missing, and, where wanted, whether every byte is right.

No receipt is needed: a copy made by hand is compared with the store's own index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tierd.errors import DriveError, StoreDamaged, UsageError
from tierd.mirror.directory import check_directory, is_same_file, original
from tierd.mirror.receipt import RECEIPT_FILE, STAGING_FILE, Receipt
from tierd.store.checksums import sha256
from tierd.store.manifest import INDEX_FILE, MANIFEST_FILE, MAX_MANIFEST_BYTES, Shard
from tierd.store.pieces import Problem, check_pieces, shard_pieces
from tierd.store.reading import read_small_file
from tierd.store.store import ExpertStore, check_shard
from tierd.store.writing import PARTIAL_SUFFIX

__all__ = ["MirrorReport", "MirrorState", "inspect_mirror"]


class MirrorState(StrEnum):
    """What a mirror is good for."""

    READY = "ready"
    """All expert shards are there, and nothing is wrong with them."""
    PARTIAL = "partial"
    """Some expert shards are there, and nothing is wrong with those."""
    NOT_READY = "not ready"
    """Nothing is there, or something that is there is wrong."""


@dataclass(slots=True)
class MirrorReport:
    """What was found.

    Attributes:
        store: directory of the primary.
        mirror: directory of the copy.
        fingerprint: of the store.
        receipt: "complete", "staging" or "none".
        read: whether the bytes were read, or only sizes and headers looked at.
        shards: expert shards of the store.
        present: names of expert shards that are there and good.
        missing: names of expert shards that are not there, and of other shards that should be.
        unfinished: names of temporary files that the next staging continues.
        records: expert records that were read.
        bytes_read: bytes that were read.
        bytes_present: bytes of good expert shards.
        problems: what is wrong.
    """

    store: str
    mirror: str
    fingerprint: str
    receipt: str = "none"
    read: bool = True
    shards: int = 0
    present: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    records: int = 0
    bytes_read: int = 0
    bytes_present: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.problems

    @property
    def state(self) -> MirrorState:
        """What the mirror is good for."""
        missing = set(self.missing)
        if not self.present or any(problem.file not in missing for problem in self.problems):
            return MirrorState.NOT_READY
        return MirrorState.PARTIAL if self.missing else MirrorState.READY

    def to_table(self) -> dict[str, Any]:
        """The report for machines."""
        return {"ok": self.ok, "state": self.state.value, **asdict(self)}


def inspect_mirror(
    store: ExpertStore,
    directory: Path,
    *,
    read: bool,
    pace: Callable[[int], None] = lambda _nbytes: None,
    progress: Callable[[int, int, str], None] = lambda _done, _total, _file: None,
) -> MirrorReport:
    """Looks at every file of a mirror.

    A file that is not there is a problem where the receipt lists it, or where there is no receipt at all: then a
    complete copy is expected. Files of a store that are no expert shards may be missing, but not be wrong.

    Args:
        store: the primary; only its manifest and index are read.
        directory: the copy.
        read: True reads every byte; False looks at lengths and headers only.
        pace: called with bytes as they are read; sleeps to bound the rate.
        progress: called with bytes done, bytes in all and the current file.

    Raises:
        UsageError: the directory is not there, is the store itself, or a copy of another store.
    """
    if not directory.exists():
        raise UsageError(f"{directory} does not exist", hint="`tierd mirror stage` makes a mirror.")
    report = MirrorReport(str(store.path), str(directory), store.fingerprint, read=read)
    report.shards = len(store.manifest.shards)
    receipt: Receipt | None = None
    try:
        receipt = check_directory(store, directory)
    except (StoreDamaged, DriveError) as error:
        name = next((n for n in (STAGING_FILE, RECEIPT_FILE) if n in error.message), MANIFEST_FILE)
        report.problems.append(Problem(name, error.message))
    if receipt is not None:
        report.receipt = "complete" if receipt.complete else "staging"
    shards = (*store.manifest.shards, *store.manifest.dense_shards)
    total = sum(shard.bytes for shard in shards if (directory / shard.file).exists())
    done = 0
    for number, shard in enumerate(shards):
        experts = number < len(store.manifest.shards)
        path = directory / shard.file
        if path.with_name(path.name + PARTIAL_SUFFIX).exists():
            report.unfinished.append(shard.file + PARTIAL_SUFFIX)
        if not path.exists():
            _missing(report, receipt, path, experts=experts)
            continue
        before = done

        def moved(end: int, file: str = shard.file, before: int = before) -> None:
            progress(before + end, total, file)

        problems = _look(store, shard, path, report, pace, moved) if read else _glance(shard, path)
        if is_same_file(path, original(store, shard.file)):
            problems.append(Problem(shard.file, f"{path} is the store's own file, not a copy"))
        report.problems += problems
        if experts and not problems:
            report.present.append(shard.file)
            report.bytes_present += shard.bytes
        done += shard.bytes
    _check_texts(store, directory, report)
    return report


def _missing(report: MirrorReport, receipt: Receipt | None, path: Path, *, experts: bool) -> None:
    expected = experts if receipt is None else path.name in receipt.files
    if experts or expected:
        report.missing.append(path.name)
    if path.is_symlink():
        report.problems.append(Problem(path.name, f"{path} is a link to {path.readlink()}, which is not there"))
    elif expected:
        report.problems.append(Problem(path.name, "missing"))


def _glance(shard: Shard, path: Path) -> list[Problem]:
    try:
        check_shard(path, shard)
    except StoreDamaged as error:
        return [Problem(shard.file, error.message)]
    except OSError as error:
        return [Problem(shard.file, f"{path} cannot be read: {error.strerror}")]
    return []


def _look(
    store: ExpertStore,
    shard: Shard,
    path: Path,
    report: MirrorReport,
    pace: Callable[[int], None],
    moved: Callable[[int], None],
) -> list[Problem]:
    problems = []
    for piece, problem in check_pieces(path, shard, shard_pieces(store, shard)):
        if problem is not None:
            problems.append(problem)
        if piece is not None:
            report.records += piece.expert is not None
            report.bytes_read += piece.nbytes
            pace(piece.nbytes)
            moved(piece.offset + piece.nbytes)
    return problems


def _check_texts(store: ExpertStore, directory: Path, report: MirrorReport) -> None:
    for file in (*store.manifest.files, store.manifest.index):
        path = directory / file.name
        if not path.exists():
            continue
        try:
            good = sha256(read_small_file(path, file.bytes)) == file.sha256
        except (StoreDamaged, DriveError):
            good = False
        if not good:
            kind = "index" if file.name == INDEX_FILE else "file"
            report.problems.append(Problem(file.name, f"{path} is not the {kind} of this store"))
    manifest = directory / MANIFEST_FILE
    try:
        if (
            manifest.exists()
            and read_small_file(manifest, MAX_MANIFEST_BYTES) != (store.path / MANIFEST_FILE).read_bytes()
        ):
            report.problems.append(Problem(MANIFEST_FILE, f"{manifest} differs from that of {store.path}"))
    except (StoreDamaged, DriveError) as error:
        report.problems.append(Problem(MANIFEST_FILE, error.message))
