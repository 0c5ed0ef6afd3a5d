"""All checks, in the order in which a person reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tierd.addresses import Address, default_socket, parse_address
from tierd.devices.transfers import Transfer, system_transfer
from tierd.doctor.check import Check, Status
from tierd.doctor.daemon_check import check_daemon
from tierd.doctor.drive_checks import check_bandwidth, check_mirror, check_space
from tierd.doctor.host_checks import (
    check_descriptors,
    check_folders,
    check_huge_pages,
    check_membarrier,
    check_memory,
    memory_room,
)
from tierd.doctor.settings_checks import check_settings
from tierd.doctor.store_checks import check_everything, check_files, check_samples, describe, sample_records
from tierd.errors import StoreDamaged
from tierd.service.mirror_option import parse_mirror
from tierd.settings import ServeSettings
from tierd.store.store import ExpertStore

__all__ = ["examine"]


def examine(
    path: Path,
    settings: ServeSettings,
    *,
    mirrors: Sequence[Path] = (),
    also: Sequence[Path] = (),
    deep: bool = False,
    transfer: Transfer = system_transfer,
) -> Iterator[Check]:
    """Looks at everything; takes a second or two, and as long as reading everything takes with `deep`.

    Args:
        path: the store.
        settings: of the daemon, from file and environment.
        mirrors: directories of mirrors, beside those of the settings.
        also: directories with shards that the store lacks, beside those of the settings.
        deep: read every byte of the store and of the mirrors, too.
        transfer: what moves the bytes of sampled records.

    Yields:
        Findings as they come.

    Raises:
        UsageError: the path is no store.
    """
    try:
        store = ExpertStore.load(path)
    except StoreDamaged as error:
        yield Check("store", Status.PROBLEM, error.message, error.hint or "Restore it, or convert again.", str(path))
        return
    settings = settings.model_copy(update={"also": (*also, *settings.also)})
    store.find_shards(settings.also)
    checks = [describe(store), *check_files(store), *(check_everything(store) if deep else ())]
    yield from (replace(check, where=str(path)) for check in checks)
    by_drive: dict[Path, list[Path]] = {}
    for shard in store.shard_paths:
        by_drive.setdefault(shard.parent, []).append(shard)
    for directory, shards in by_drive.items():
        paths = [shard if shard.parent == directory and shard.exists() else None for shard in store.shard_paths]
        samples = sample_records(store, paths, transfer=transfer)
        checks = check_samples(samples)
        checks.append(check_bandwidth(shards, store.geometry.slot_bytes, direct=not samples.buffered))
        checks.append(check_space(directory))
        yield from (replace(check, where=str(directory)) for check in checks)
    known = [parse_mirror(text).directory for text in settings.mirror]
    wanted = list(dict.fromkeys([*mirrors, *(directory for directory in known if directory.is_dir())]))
    for directory in wanted:
        checks = check_mirror(store, directory, deep=deep, transfer=transfer)
        yield from (replace(check, where=str(directory)) for check in checks)
    room = memory_room(store, settings.max_sessions)
    yield check_memory(store, room)
    yield check_huge_pages()
    yield check_membarrier()
    yield from check_folders()
    yield check_descriptors(store, len(by_drive) + len(wanted))
    yield from check_settings(store, settings, room)
    yield from check_daemon(_operators_socket(store.path, settings))


def _operators_socket(store: Path, settings: ServeSettings) -> Address:
    """Where a daemon with these settings answers operators: a socket that was named, or the store's own."""
    named = ((settings.local, "local"), (settings.listen, "listen"))
    addresses = [parse_address(text, option=option) for text, option in named if text]
    return next((address for address in addresses if address.path is not None), default_socket(store))
