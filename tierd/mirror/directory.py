"""A mirror's directory: may it be one of this store, how much room has it, and what lies in it already."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tierd.errors import StoreDamaged, UsageError
from tierd.mirror.plan import MirrorFile
from tierd.mirror.receipt import Receipt, read_receipt
from tierd.store.manifest import MANIFEST_FILE, read_manifest
from tierd.store.store import ExpertStore

__all__ = ["belongs", "check_directory", "free_bytes", "held_bytes", "is_same_file", "locked", "original"]


def check_directory(store: ExpertStore, directory: Path) -> Receipt | None:
    """The receipt of a directory that may be a mirror of the store; it may be new, or empty, or hold loose files.

    Raises:
        UsageError: it is the store itself, no directory, or a copy of another store.
        StoreDamaged: its receipt or manifest cannot be read.
    """
    if not directory.exists():
        return None
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory")
    if directory.samefile(store.path):
        raise UsageError(f"{directory} is the store itself", hint="Name a directory on another drive.")
    receipt = read_receipt(directory)
    theirs = receipt.fingerprint if receipt is not None else None
    if theirs is None and (directory / MANIFEST_FILE).exists():
        theirs = read_manifest(directory / MANIFEST_FILE).fingerprint
    if theirs is not None and theirs != store.fingerprint:
        raise UsageError(
            f"{directory} holds a copy of another store ({theirs[:12]}) than {store.path} ({store.fingerprint[:12]})",
            hint="Choose another directory, or move that copy away.",
        )
    return receipt


def belongs(store: ExpertStore, directory: Path, receipt: Receipt | None) -> bool:
    """True if the directory says itself that it is a copy of this store, so that a bad file in it may be replaced."""
    if receipt is not None:
        return receipt.fingerprint == store.fingerprint
    try:
        return read_manifest(directory / MANIFEST_FILE).fingerprint == store.fingerprint
    except (StoreDamaged, UsageError):
        return False


def free_bytes(directory: Path) -> int:
    """Bytes that the drive of a directory, or of where it will be, has for ordinary users."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    drive = os.statvfs(place)
    return drive.f_bavail * drive.f_frsize


def held_bytes(directory: Path, files: list[MirrorFile], suffix: str) -> int:
    """Bytes on the drive of those of the files that are there, finished or with the suffix of unfinished ones."""
    total = 0
    for file in files:
        for name in (file.name, file.name + suffix):
            with contextlib.suppress(OSError):
                status = (directory / name).lstat()
                total += min(status.st_blocks * 512, status.st_size)
    return total


def original(store: ExpertStore, name: str) -> Path:
    """Where the store has a file of that name; an expert shard may lie in another directory than the rest."""
    return next((path for path in store.shard_paths if path.name == name), store.path / name)


def is_same_file(path: Path, original: Path) -> bool:
    """True if a file of the mirror is the store's own file under another name: no copy at all."""
    try:
        return path.samefile(original)
    except OSError:
        return False


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keeps other stagings and repairs out of a directory while the context lasts.

    Raises:
        UsageError: one is running.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{directory}: another staging or repair of this mirror is running") from None
        except OSError:
            # Some network filesystems lock no directories; the renames at the end keep every file whole anyway.
            pass
        yield
    finally:
        os.close(fd)
