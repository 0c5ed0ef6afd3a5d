"""Drives and mirrors: how fast, how full, and whether a mirror is one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tierd.devices.copies import Copy, admit_copy
from tierd.devices.probe import probe_drive
from tierd.devices.transfers import Transfer, system_transfer
from tierd.doctor.check import Check, Status
from tierd.doctor.store_checks import check_samples, sample_records
from tierd.errors import StoreDamaged, TierdError
from tierd.mirror.directory import check_directory, free_bytes
from tierd.sizes import format_bytes
from tierd.store.pieces import check_pieces, shard_pieces
from tierd.store.store import ExpertStore

__all__ = ["check_bandwidth", "check_mirror", "check_space"]

_MAX_NAMED: Final = 3
_LITTLE: Final = 1 << 30
_SMALL: Final = 8 << 20
"""Files below this are read so fast that their drive's speed does not matter."""


def check_bandwidth(paths: Sequence[Path], record_bytes: int, *, direct: bool) -> Check:
    """How fast the drive of these files is; measured now."""
    name = "bandwidth"
    there = [path for path in paths if path.exists() and os.access(path, os.R_OK)]
    if not there:
        return Check(name, Status.PROBLEM, "no shard can be read", "Check that the drive is mounted.")
    found = probe_drive(there, record_bytes=record_bytes)
    if found.bandwidth is None and direct and max(path.stat().st_size for path in there) < _SMALL:
        return Check(name, Status.OK, found.how)
    if found.bandwidth is None:
        return Check(name, Status.REMARK, found.how, "Speed can be told on a filesystem with direct I/O only.")
    return Check(name, Status.OK, f"{format_bytes(found.bandwidth)}/s, {found.how}")


def check_space(directory: Path) -> Check:
    """Free space; a daemon writes nothing there, conversions and mirrors do."""
    free = free_bytes(directory)
    detail = f"{format_bytes(free)} free"
    if free < _LITTLE:
        return Check("space", Status.REMARK, detail, "Nothing more can be converted or staged onto this drive.")
    return Check("space", Status.OK, detail)


def check_mirror(
    store: ExpertStore, directory: Path, *, deep: bool = False, transfer: Transfer = system_transfer
) -> list[Check]:
    """Which shards of a mirror will be read, and why others will not; with `deep`, every byte of them."""
    name = "mirror"
    stage = shlex.join(["tierd", "mirror", "stage", str(store.path), str(directory)])
    if not directory.is_dir():
        return [Check(name, Status.PROBLEM, "there is no such directory", f"Mount the drive, or make it: {stage}")]
    checks: list[Check] = []
    try:
        receipt = check_directory(store, directory)
        if receipt is not None and not receipt.complete:
            checks.append(Check(name, Status.REMARK, "its staging is not complete", f"Go on with it: {stage}"))
    except StoreDamaged as error:
        checks.append(Check(name, Status.REMARK, error.message, error.hint))
    except TierdError as error:
        return [Check(name, Status.PROBLEM, error.message, error.hint)]
    copy = admit_copy(store, directory)
    held, total = len(copy.shards), len(copy.paths)
    if copy.left_out:
        more = f" and {len(copy.left_out) - _MAX_NAMED} more" if len(copy.left_out) > _MAX_NAMED else ""
        detail = f"{len(copy.left_out)} of {total} shards will not be read from it: "
        detail += "; ".join(copy.left_out[:_MAX_NAMED]) + more
        checks.append(Check(name, Status.REMARK, detail, f"Make them anew: {stage}"))
    if not held:
        checks.append(Check(name, Status.PROBLEM, "it holds no shard that could be read", f"Fill it: {stage}"))
        return checks
    if not copy.left_out:
        checks.append(Check(name, Status.OK, f"{held} of {total} shards" + ("" if held == total else " (partial)")))
    if directory.stat().st_dev == store.path.stat().st_dev:
        checks.append(
            Check(
                name,
                Status.REMARK,
                "it lies on the same drive as the store: it adds safety against damaged files, but no bandwidth",
                "Put the mirror on another drive.",
            )
        )
    if deep:
        checks += _contents(store, copy, stage)
    samples = sample_records(store, copy.paths, transfer=transfer)
    checks += check_samples(samples)
    readable = [path for path in copy.paths if path is not None]
    checks.append(check_bandwidth(readable, store.geometry.slot_bytes, direct=not samples.buffered))
    checks.append(check_space(directory))
    return checks


def _contents(store: ExpertStore, copy: Copy, stage: str) -> list[Check]:
    """Reads every byte of a mirror's expert shards."""
    problems: list[Check] = []
    nbytes = records = 0
    for shard, path in zip(store.manifest.shards, copy.paths, strict=True):
        if path is None:
            continue
        for piece, problem in check_pieces(path, shard, shard_pieces(store, shard)):
            if piece is not None:
                records, nbytes = records + 1, nbytes + piece.nbytes
            if problem is not None:
                problems.append(Check("contents", Status.PROBLEM, str(problem), f"Copy it again: {stage}"))
    detail = f"{records} experts read and right ({format_bytes(nbytes)})"
    return problems or [Check("contents", Status.OK, detail)]
