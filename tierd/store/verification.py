"""Reading every byte of a store again: all problems are listed, none stops the reading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tierd.errors import DriveError, StoreDamaged
from tierd.store.manifest import MANIFEST_FILE, Shard
from tierd.store.pieces import MISMATCH, Problem, check_pieces, shard_pieces
from tierd.store.store import ExpertStore
from tierd.store.verification_notes import CheckedShard, VerificationNotes

__all__ = ["Problem", "VerificationReport", "verify_store"]


@dataclass(slots=True)
class VerificationReport:
    """What was read and what is wrong with it.

    Attributes:
        store: directory.
        fingerprint: of the store.
        records: expert records that were looked at.
        tensors: dense tensors that were looked at.
        bytes_read: in this run and, where it went on with an interrupted one, in that.
        bytes_before: of these, read by the interrupted run.
        problems: everything that is wrong.
    """

    store: str
    fingerprint: str = ""
    records: int = 0
    tensors: int = 0
    bytes_read: int = 0
    bytes_before: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.problems

    def to_table(self) -> dict[str, Any]:
        """The report for machines."""
        return {"ok": self.ok, **asdict(self)}


def verify_store(
    path: Path | str,
    progress: Callable[[int, int, str], None] | None = None,
    *,
    notes_folder: Path | None = None,
    max_notes_age: float = 86400.0,
) -> VerificationReport:
    """Reads all records, dense tensors and small files of a store and compares their checksums.

    Args:
        path: the store.
        progress: called with bytes read, bytes in all and the current file.
        notes_folder: where an interrupted run leaves notes, and where they are looked for; None keeps none.
        max_notes_age: seconds after which what an interrupted run saw is read again.

    Raises:
        UsageError: the path is no store.
    """
    root = Path(path)
    report = VerificationReport(str(root))
    try:
        store = ExpertStore.load(root)
    except StoreDamaged as error:
        report.problems.append(Problem(MANIFEST_FILE, error.message))
        return report
    report.fingerprint = store.fingerprint
    notes = VerificationNotes.open(notes_folder, root, store.fingerprint, max_notes_age)
    shards = (*store.manifest.shards, *store.manifest.dense_shards)
    total = sum(shard.bytes for shard in shards)
    done = 0
    for shard in shards:
        checked = notes.find(root / shard.file)
        if checked is None:
            before = done

            def moved(nbytes: int, file: str = shard.file, before: int = before) -> None:
                if progress is not None:
                    progress(before + nbytes, total, file)

            checked = _check(store, shard, moved)
            notes.add(root / shard.file, checked)
        else:
            report.bytes_before += checked.bytes_read
        done += shard.bytes
        if progress is not None:
            progress(done, total, shard.file)
        report.records += checked.records
        report.tensors += checked.tensors
        report.bytes_read += checked.bytes_read
        report.problems += checked.problems
    for name in store.text_files:
        try:
            report.bytes_read += len(store.read_file(name))
        except (StoreDamaged, DriveError) as error:
            report.problems.append(Problem(name, error.message))
    notes.remove()
    return report


def _check(store: ExpertStore, shard: Shard, moved: Callable[[int], None]) -> CheckedShard:
    checked = CheckedShard()
    for piece, problem in check_pieces(store.path / shard.file, shard, shard_pieces(store, shard)):
        if problem is not None:
            checked.problems.append(problem)
        if piece is None:
            continue
        checked.records += piece.expert is not None
        checked.tensors += piece.tensor is not None
        if problem is None or problem.reason == MISMATCH:
            checked.bytes_read += piece.nbytes
        moved(piece.offset + piece.nbytes)
    return checked
