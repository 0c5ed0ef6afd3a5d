"""Making a mirror: every planned file is copied unless a good copy is there; the receipt comes last.

The store is only read, and nothing is deleted. Killed at any moment it leaves whole files under final names, and
temporary ones that the next run continues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tierd.errors import DriveError, LimitExceeded, StoreDamaged
from tierd.mirror.copy import copy_shard, write_failed
from tierd.mirror.directory import belongs, check_directory, free_bytes, is_same_file, locked, original
from tierd.mirror.plan import FileKind, MirrorFile, MirrorPlan
from tierd.mirror.receipt import Receipt
from tierd.sizes import format_bytes
from tierd.store.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Shard
from tierd.store.pieces import Problem, check_pieces, shard_pieces
from tierd.store.reading import read_small_file
from tierd.store.store import ExpertStore
from tierd.store.writing import PARTIAL_SUFFIX, write_atomic

__all__ = ["StagingReport", "stage"]


@dataclass(slots=True)
class StagingReport:
    """What staging did.

    Attributes:
        store: directory of the primary.
        mirror: directory of the copy.
        fingerprint: of the store.
        copied: names of files that were copied now.
        kept: names of files that were there and are good.
        left_out: names of files that do not fit.
        bytes_copied: of the files copied now.
        problems: files that could not be copied.
    """

    store: str
    mirror: str
    fingerprint: str
    copied: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    bytes_copied: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if everything planned is there."""
        return not self.problems

    def to_table(self) -> dict[str, Any]:
        """The report for machines."""
        return {"ok": self.ok, **asdict(self)}


def stage(
    store: ExpertStore,
    directory: Path,
    plan: MirrorPlan,
    *,
    reserve: int = 0,
    pace: Callable[[int], None] = lambda _nbytes: None,
    progress: Callable[[int, int, str], None] = lambda _done, _total, _file: None,
) -> StagingReport:
    """Brings the planned files into the mirror's directory.

    Args:
        store: the primary; its files may be links.
        directory: of the mirror; made when needed.
        plan: what to copy, in order.
        reserve: bytes of the mirror's drive to leave free.
        pace: called with bytes as they are moved; sleeps to bound the rate.
        progress: called with bytes done, bytes in all and the current file.

    Raises:
        UsageError: the directory cannot be a mirror of this store, or another staging into it is running.
        LimitExceeded: the drive has no room left for the next file.
        DriveError: writing failed. What is through stays, and the next run goes on.
    """
    check_directory(store, directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_failed(directory, error) from error
    with locked(directory):
        run = _Staging(store, directory, plan, reserve, pace, progress)
        return run.run()


class _Staging:
    def __init__(
        self,
        store: ExpertStore,
        directory: Path,
        plan: MirrorPlan,
        reserve: int,
        pace: Callable[[int], None],
        progress: Callable[[int, int, str], None],
    ) -> None:
        self._store = store
        self._directory = directory
        self._plan = plan
        self._reserve = reserve
        self._pace = pace
        self._progress = progress
        self._done = 0
        before = check_directory(store, directory)
        self._replaceable = belongs(store, directory, before)
        self._receipt = Receipt(store.fingerprint, str(store.path.resolve()), dict(before.files) if before else {})
        self._shards = {shard.file: shard for shard in (*store.manifest.shards, *store.manifest.dense_shards)}
        self.report = StagingReport(
            str(store.path), str(directory), store.fingerprint, left_out=[file.name for file in plan.left_out]
        )

    def run(self) -> StagingReport:
        # From here on the directory says whose copy it will be.
        self._receipt.save(self._directory)
        for file in self._plan.files:
            path, end = self._directory / file.name, self._done + file.nbytes
            problem = self._bring(file, path)
            if problem is not None:
                self.report.problems.append(problem)
                self._receipt.files.pop(file.name, None)
            else:
                self._receipt.note(path)
                self._receipt.save(self._directory)
            self._done = end
            self._progress(self._done, self._plan.nbytes, file.name)
        self._receipt.complete = self.report.ok
        self._receipt.save(self._directory)
        return self.report

    def _bring(self, file: MirrorFile, path: Path) -> Problem | None:
        if file.kind is FileKind.TEXT:
            return self._bring_text(file.name, path)
        shard = self._shards[file.name]
        if path.exists() and not is_same_file(path, original(self._store, file.name)):
            wrong = None if self._receipt.vouches_for(path) else self._check(shard, path)
            if wrong is None:
                self.report.kept.append(file.name)
                return None
            if not self._replaceable:
                reason = f"{path} is in the way: {wrong.reason}; nothing shows that it is a copy of this store"
                return Problem(file.name, f"{reason}, so it was not replaced")
        return self._copy(shard, path)

    def _copy(self, shard: Shard, path: Path) -> Problem | None:
        self._check_room(path, shard)
        source, begin = original(self._store, shard.file), self._done
        self._progress(begin, self._plan.nbytes, shard.file)

        def moved(nbytes: int) -> None:
            self._pace(nbytes)
            self._done += nbytes
            self._progress(self._done, self._plan.nbytes, shard.file)

        try:
            copy_shard(source, path, shard, shard_pieces(self._store, shard), moved)
        except StoreDamaged as error:
            return Problem(shard.file, error.message)
        except DriveError as error:
            if error.path != str(source):
                raise
            return Problem(shard.file, error.message, offset=error.offset, nbytes=error.length)
        finally:
            self._done = begin
        self.report.copied.append(shard.file)
        self.report.bytes_copied += shard.bytes
        return None

    def _bring_text(self, name: str, path: Path) -> Problem | None:
        source = self._store.path / name
        try:
            if name in self._store.text_files:
                data = self._store.read_file(name)
            else:
                data = read_small_file(source, MAX_MANIFEST_BYTES if name == MANIFEST_FILE else source.stat().st_size)
        except (StoreDamaged, DriveError) as error:
            return Problem(name, error.message)
        if path.exists() and not path.is_symlink() and path.read_bytes() == data:
            self.report.kept.append(name)
            return None
        if path.exists() and not self._replaceable and not is_same_file(path, source):
            return Problem(name, f"{path} is in the way and is not a copy of {source}, so it was not replaced")
        write_atomic(path, data)
        self.report.copied.append(name)
        self.report.bytes_copied += len(data)
        return None

    def _check(self, shard: Shard, path: Path) -> Problem | None:
        """The first thing wrong with a file that is there already."""
        for piece, problem in check_pieces(path, shard, shard_pieces(self._store, shard)):
            if problem is not None:
                return problem
            if piece is not None:
                self._pace(piece.nbytes)
                self._progress(self._done + piece.offset + piece.nbytes, self._plan.nbytes, shard.file)
        return None

    def _check_room(self, path: Path, shard: Shard) -> None:
        partial = path.with_name(path.name + PARTIAL_SUFFIX)
        needed = shard.bytes - (partial.stat().st_blocks * 512 if partial.exists() else 0)
        free = free_bytes(self._directory)
        if needed > free - self._reserve:
            raise LimitExceeded(
                f"{self._directory}: {shard.file} needs {format_bytes(needed)}, {format_bytes(free)} are free"
                + (f" and {format_bytes(self._reserve)} are to stay free" if self._reserve else ""),
                hint="Free some space, or give a smaller --budget, and run the same command again: it goes on.",
            )
