"""Reading a directory's copies again at a bounded rate, and, on request only, mending them from good copies.

A bad record is written again in its place; a file that is short or has another header is copied anew. Every byte comes
from a copy whose checksum was right, and is read back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tierd.errors import DriveError, StoreDamaged, TierdError, UsageError
from tierd.mirror.copy import copy_shard, write_failed
from tierd.mirror.directory import is_same_file, locked
from tierd.mirror.receipt import Receipt, read_receipt
from tierd.store.checksums import xxh3
from tierd.store.manifest import Shard
from tierd.store.pieces import WINDOW_BYTES, Piece, Problem, check_pieces, piece_checksum, shard_pieces
from tierd.store.reading import aligned_buffer, read_exact
from tierd.store.store import ExpertStore

__all__ = ["ScrubReport", "scrub"]


@dataclass(slots=True)
class ScrubReport:
    """What was found, and what was done about it.

    Attributes:
        directory: that was read.
        fingerprint: of the store.
        shards: that are there and were read.
        records: expert records that were read.
        bytes_read: of records and tensors.
        repaired: what was wrong and is right now.
        replaced: names of files that were copied anew as a whole.
        problems: what is still wrong.
    """

    directory: str
    fingerprint: str
    shards: int = 0
    records: int = 0
    bytes_read: int = 0
    repaired: list[Problem] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing is wrong (any more)."""
        return not self.problems

    def to_table(self) -> dict[str, Any]:
        """The report for machines."""
        return {"ok": self.ok, **asdict(self)}


def scrub(
    store: ExpertStore,
    directory: Path,
    *,
    sources: Sequence[Path] | None = None,
    pace: Callable[[int], None] = lambda _nbytes: None,
    progress: Callable[[int, int, str], None] = lambda _done, _total, _file: None,
) -> ScrubReport:
    """Reads every shard that a directory has; what it has not is left alone.

    Args:
        store: says what the bytes should be; only its manifest and index are used.
        directory: the store's own, or that of a mirror.
        sources: directories with copies from which to mend; None only reads.
        pace: called with bytes as they are moved; sleeps to bound the rate.
        progress: called with bytes done, bytes in all and the current file.

    Raises:
        UsageError: there is no shard, a source is the directory itself, or another repair is running.
        DriveError: a repaired file cannot be written.
    """
    shards = [s for s in (*store.manifest.shards, *store.manifest.dense_shards) if (directory / s.file).exists()]
    if not shards:
        raise UsageError(f"{directory} holds no shard of {store.path}")
    for source in sources or ():
        if not source.is_dir() or source.samefile(directory):
            raise UsageError(f"{source} is no other directory with copies from which {directory} could be repaired")
    report = ScrubReport(str(directory), store.fingerprint)
    total, done = sum(shard.bytes for shard in shards), 0
    with locked(directory) if sources is not None else contextlib.nullcontext():
        for shard in shards:
            found: list[tuple[Piece | None, Problem]] = []
            for piece, problem in check_pieces(directory / shard.file, shard, shard_pieces(store, shard)):
                if problem is not None:
                    found.append((piece, problem))
                if piece is not None:
                    report.records += piece.expert is not None
                    report.bytes_read += piece.nbytes
                    pace(piece.nbytes)
                    progress(done + piece.offset + piece.nbytes, total, shard.file)
            report.shards += 1
            if found and sources is not None:
                _mend(store, directory / shard.file, shard, found, sources, pace, report)
            else:
                report.problems += [problem for _, problem in found]
            done += shard.bytes
    return report


def _mend(
    store: ExpertStore,
    path: Path,
    shard: Shard,
    found: list[tuple[Piece | None, Problem]],
    sources: Sequence[Path],
    pace: Callable[[int], None],
    report: ScrubReport,
) -> None:
    copies = [source / shard.file for source in sources if not is_same_file(source / shard.file, path)]
    whole = [problem for piece, problem in found if piece is None]
    if whole:
        why = _copy_anew(store, path, shard, copies, pace)
        outcome = [problem for _, problem in found]
        if why:
            report.problems += [*outcome, Problem(shard.file, f"not repaired: {why}")]
            return
        report.repaired += outcome
        report.replaced.append(shard.file)
    else:
        for piece, problem in found:
            assert piece is not None
            why = _rewrite(path, piece, copies)
            pace(piece.nbytes)
            if why:
                report.problems += [problem, piece.problem(shard.file, f"not repaired: {why}")]
            else:
                report.repaired.append(problem)
    receipt = _receipt(path.parent)
    if receipt is not None and path.name in receipt.files:
        receipt.note(path)
        receipt.save(path.parent)


def _copy_anew(
    store: ExpertStore, path: Path, shard: Shard, copies: Sequence[Path], pace: Callable[[int], None]
) -> str:
    """Why no copy could take the place of a file; empty if one did."""
    reasons = []
    for copy in copies:
        try:
            copy_shard(copy, path, shard, shard_pieces(store, shard), pace)
        except StoreDamaged as error:
            reasons.append(error.message)
        except DriveError as error:
            if error.path != str(copy):
                raise
            reasons.append(error.message)
        else:
            return ""
    return "; ".join(reasons) or "no other copy of the file was named"


def _rewrite(path: Path, piece: Piece, copies: Sequence[Path]) -> str:
    """Why a record could not be written again; empty if it is right now."""
    reasons = []
    for copy in copies:
        try:
            data = read_exact(copy, piece.offset, piece.nbytes)
        except DriveError as error:
            reasons.append(error.message)
            continue
        if xxh3(data) != piece.xxh3:
            reasons.append(f"{copy} has wrong bytes there, too")
            continue
        try:
            # A link is not followed: what lies behind it is not this directory's.
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            return f"{path} cannot be written: {error.strerror}"
        try:
            written = 0
            while written < piece.nbytes:
                written += os.pwrite(fd, data.data[written:], piece.offset + written)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            buffer = aligned_buffer(min(WINDOW_BYTES, piece.nbytes))
            good = piece_checksum(fd, piece, buffer, path) == piece.xxh3
        except OSError as error:
            raise write_failed(path, error) from error
        finally:
            os.close(fd)
        return "" if good else "it reads back wrong after it was written: the drive is failing"
    return "; ".join(reasons) or "no other copy of the file was named"


def _receipt(directory: Path) -> Receipt | None:
    try:
        return read_receipt(directory)
    except TierdError:
        return None
