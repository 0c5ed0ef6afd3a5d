"""The store: is it one, are its files whole, and do records taken here and there have the right bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tierd.devices.shard_file import ShardFile
from tierd.devices.transfers import Transfer, system_transfer
from tierd.doctor.check import Check, Status
from tierd.errors import DriveError, StoreDamaged
from tierd.mirror.directory import original
from tierd.sizes import format_bytes, format_count
from tierd.store.checksums import xxh3
from tierd.store.pieces import Piece, shard_pieces
from tierd.store.reading import aligned_buffer
from tierd.store.store import ExpertStore, check_shard
from tierd.store.verification import verify_store
from tierd.store.writing import PARTIAL_SUFFIX

__all__ = ["Samples", "check_everything", "check_files", "check_samples", "describe", "sample_records"]

_SAMPLE_SECONDS: Final = 3.0
_MAX_NAMED: Final = 3
_RESTORE: Final = "Restore the file from another copy, or convert the checkpoint again."


def describe(store: ExpertStore) -> Check:
    """What the store is; its manifest and index have been checked by opening it."""
    manifest = store.manifest
    return Check(
        "store",
        Status.OK,
        f"{manifest.model_type or 'synthetic'}, {store.geometry.experts_total} experts in "
        f"{format_count(len(manifest.shards), 'shard')}, {format_bytes(manifest.total_bytes)}, "
        f"fingerprint {store.fingerprint[:12]}…",
    )


def check_files(store: ExpertStore) -> list[Check]:
    """Lengths and headers of all shards, text files, and what does not belong."""
    wrong = []
    for shard in (*store.manifest.shards, *store.manifest.dense_shards):
        try:
            check_shard(original(store, shard.file), shard)
        except StoreDamaged as error:
            wrong.append(error.message)
        except OSError as error:
            wrong.append(f"{original(store, shard.file)} cannot be read: {error.strerror}")
    for name in store.text_files:
        try:
            store.read_file(name)
        except (StoreDamaged, DriveError) as error:
            wrong.append(error.message)
    checks = [Check("files", Status.PROBLEM, message, _RESTORE) for message in wrong]
    if not wrong:
        count = len(store.manifest.shards) + len(store.manifest.dense_shards)
        checks.append(Check("files", Status.OK, f"{format_count(count, 'shard')} with the right length and header"))
    left = sorted(path.name for path in store.path.glob(f"*{PARTIAL_SUFFIX}"))
    if left:
        checks.append(
            Check(
                "leftovers",
                Status.REMARK,
                f"{_some(left)} in {store.path} were left by something that was interrupted",
                "Nothing reads them; remove them if no conversion into this directory is to go on.",
            )
        )
    return checks


@dataclass(slots=True)
class Samples:
    """Records read here and there.

    Attributes:
        read: how many.
        nbytes: of them.
        shards: that were sampled.
        buffered: files whose reads went through the page cache, because the filesystem refuses direct reads.
        errors: by path of the file.
    """

    read: int = 0
    nbytes: int = 0
    shards: int = 0
    buffered: list[Path] = field(default_factory=list)
    errors: dict[Path, DriveError] = field(default_factory=dict)


def sample_records(
    store: ExpertStore,
    paths: Sequence[Path | None],
    *,
    seconds: float = _SAMPLE_SECONDS,
    transfer: Transfer = system_transfer,
) -> Samples:
    """Reads one record of each shard as the daemon would, the first and the last in turn, and checks it.

    Args:
        store: says where records lie.
        paths: a copy of each expert shard, None where there is none.
        seconds: after which no further shard is begun.
        transfer: what moves the bytes.
    """
    samples = Samples()
    until = time.monotonic() + seconds
    memory = aligned_buffer(store.geometry.slot_bytes).data
    for number, path in enumerate(paths):
        if path is None:
            continue
        if samples.shards and time.monotonic() > until:
            break
        samples.shards += 1
        pieces = shard_pieces(store, store.manifest.shards[number])
        try:
            _sample(path, pieces[-1 if number % 2 else 0], memory, samples, transfer)
        except DriveError as error:
            samples.errors[path] = error
    return samples


def _sample(path: Path, piece: Piece, memory: memoryview, samples: Samples, transfer: Transfer) -> None:
    file = ShardFile("doctor", path, direct=True)
    try:
        into = memory[: piece.nbytes]
        file.read(piece.offset, into, transfer)
        samples.read += 1
        samples.nbytes += piece.nbytes
        if xxh3(into) != piece.xxh3:
            raise DriveError(
                f"{path}: checksum of layer {piece.layer} expert {piece.expert} does not match "
                f"(offset {piece.offset}, {piece.nbytes} bytes)",
                hint="`tierd verify` lists everything that is wrong.",
            )
        if not file.direct:
            samples.buffered.append(path)
    finally:
        file.close()


def check_samples(samples: Samples) -> list[Check]:
    """What the samples say of a directory."""
    if not samples.shards:
        return []
    checks = []
    if len(samples.errors) == samples.shards and samples.shards > 1:
        first = next(iter(samples.errors.values()))
        checks.append(
            Check(
                "reads",
                Status.PROBLEM,
                f"no shard can be read; the first: {first.message}",
                "All files fail: look at the mount and at the kernel's log.",
            )
        )
    else:
        checks += [Check("reads", Status.PROBLEM, error.message, _one_file(error)) for error in samples.errors.values()]
    if not samples.errors:
        checks.append(
            Check(
                "reads",
                Status.OK,
                f"{format_count(samples.read, 'record')} of {format_count(samples.shards, 'shard')} read and right "
                f"({format_bytes(samples.nbytes)})",
            )
        )
    readable = samples.shards - len(samples.errors)
    if samples.buffered:
        checks.append(
            Check(
                "direct I/O",
                Status.REMARK,
                f"refused by the filesystem for {len(samples.buffered)} of {readable} files "
                f"({_some([path.name for path in samples.buffered])}): they are read through the page cache",
                "Put the files on ext4, XFS or another filesystem with O_DIRECT.",
            )
        )
    elif readable:
        checks.append(
            Check("direct I/O", Status.OK, f"{format_count(readable, 'file')} sampled: all read past the page cache")
        )
    return checks


def check_everything(store: ExpertStore) -> Iterator[Check]:
    """Reads every byte of the store."""
    report = verify_store(store.path)
    for problem in report.problems:
        yield Check("contents", Status.PROBLEM, str(problem), _RESTORE)
    if report.ok:
        what = f"{report.records} experts and {report.tensors} dense tensors"
        yield Check("contents", Status.OK, f"{what} read and right ({format_bytes(report.bytes_read)})")


def _one_file(error: DriveError) -> str:
    return error.hint or "Only some files fail: their drive is failing, or they were damaged; restore them."


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
