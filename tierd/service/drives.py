"""The daemon's drives: the store's own directory, mirrors, and directories that hold shards of a split store."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

import structlog

from tierd.devices.copies import admit_copy
from tierd.devices.device import ReadWatch
from tierd.devices.drive import Drive
from tierd.devices.fault_plan import FaultPlan, read_fault_plan
from tierd.devices.faults import FaultInjector
from tierd.devices.files import FileDevice
from tierd.devices.probe import DEFAULT_DEPTH, DriveProbe, probe_drive
from tierd.devices.probe_cache import ProbeCache, probe_key
from tierd.devices.replicas import ReplicaSet
from tierd.devices.speed import DEFAULT_BANDWIDTH
from tierd.devices.throttle import Throttle
from tierd.devices.transfers import Chain, TransferWrapper
from tierd.errors import DeadlineExceeded, TierdError, UsageError
from tierd.service.mirror_option import Mirror, parse_mirror
from tierd.settings import ServeSettings
from tierd.store.store import ExpertStore

__all__ = ["PRIMARY", "DriveInfo", "Drives"]

PRIMARY = "nvme"
"""Name of the drive with the store's own directory."""

_MAX_DRIVES = 16
_CLOSE_SECONDS = 5.0
_REMOVE_SECONDS = 30.0

_log = structlog.get_logger()


@dataclass(slots=True)
class DriveInfo:
    """What is known of a drive beside its counters.

    Attributes:
        name: unique, short, and safe as a label.
        directory: where its files lie.
        paths: one per shard of the store; None for those that it does not hold.
        weight: how much of its measured bandwidth to count on.
        left_out: files that were not admitted, and why.
        probe: how fast it was found to be.
        threads: reads at a time.
        injector: present while a fault plan is in force.
        part: whether the store itself lies here, not a copy.
        shards: numbers of the shards that it holds.
    """

    name: str
    directory: Path
    paths: list[Path | None]
    weight: float = 1.0
    left_out: list[str] = field(default_factory=list)
    probe: DriveProbe = field(default_factory=lambda: DriveProbe(None, DEFAULT_DEPTH, "not measured"))
    threads: int = DEFAULT_DEPTH
    injector: FaultInjector | None = None
    part: bool = False
    shards: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Count the shards once: they are asked for with each read."""
        self.shards = [number for number, path in enumerate(self.paths) if path is not None]


class Drives:
    """Finds, measures, opens, adds and removes drives. `measure`, then `open`, then any number of changes, `close`.

    Args:
        store: an open store.
        settings: mirrors, further directories, threads, direct reads, fault plan.
        cache: of probe results.

    Attributes:
        info: by name, in the order of being added.
        plan: the fault plan in force.
        on_read: told of every read of every drive that is opened from now on.

    Raises:
        UsageError: an option is wrong, or the fault plan is.
    """

    def __init__(self, store: ExpertStore, settings: ServeSettings, cache: ProbeCache | None = None) -> None:
        self.info: dict[str, DriveInfo] = {}
        self.plan: FaultPlan | None = read_fault_plan(settings.fault_plan) if settings.fault_plan else None
        self.on_read: ReadWatch | None = None
        self._store = store
        self._threads = settings.drive_threads
        self._direct = settings.direct
        self._cache = cache if cache is not None else ProbeCache()
        self._spares = 0
        self._changing = asyncio.Lock()
        self._set: ReplicaSet | None = None
        self._retiring: dict[str, asyncio.Task[None]] = {}
        self._check_number(1 + len(settings.also) + len(settings.mirror))
        own = [path if path.parent == store.path else None for path in store.shard_paths]
        self._know(DriveInfo(PRIMARY, store.path, own, part=True))
        for number, directory in enumerate(settings.also, start=1):
            info = self._admit(f"also{number}", Mirror(directory.expanduser().absolute()))
            info.part = True
            self._know(info)
        for text in settings.mirror:
            self._know(self._admit(self._next_name(), parse_mirror(text)))
        if self.plan is not None:
            _log.warning(
                "FAULT PLAN ACTIVE: this daemon damages reads on purpose", file=str(settings.fault_plan), plan=self.plan
            )

    @property
    def replicas(self) -> ReplicaSet:
        """The device that the broker reads from."""
        assert self._set is not None
        return self._set

    @property
    def spares(self) -> int:
        """Slots that the arena needs on top: all that hanging drives may hold while one still works, and a probe's."""
        used = [info for info in self.info.values() if info.shards]
        deepest = max(info.threads for info in used)
        return max(deepest * max(1, len(used) - 1), len(used)) + 1

    @property
    def depth(self) -> int:
        """Reads at a time of all drives in use together."""
        return sum(info.threads for info in self.info.values() if info.shards)

    async def measure(self) -> None:
        """Find bandwidth and depth of every drive, all at once, from memory where nothing has changed."""
        await asyncio.gather(*(asyncio.to_thread(self._measure, info) for info in self.info.values()))

    def open(self) -> ReplicaSet:
        """Open the drives.

        Raises:
            DriveError: a file cannot be opened.
        """
        self._spares = self.spares
        self._set = ReplicaSet(asyncio.get_running_loop(), [])
        for info in self.info.values():
            if info.shards:
                self._set.add(self._open(info))
        return self._set

    def described(self) -> tuple[str, ...]:
        """A line for people about each drive but the first, and about the fault plan."""
        lines = [
            f"{info.name} {info.directory} · {len(info.shards)} of {len(info.paths)} shards"
            + (" · NOT USED" if not info.shards else f" · {len(info.left_out)} files left out" if info.left_out else "")
            for info in list(self.info.values())[1:]
        ]
        if self.plan is not None:
            lines.append("FAULT PLAN ACTIVE: this daemon damages reads on purpose")
        return tuple(lines)

    async def close(self) -> None:
        """Let the last reads return, within a bound, and give back threads and descriptors."""
        if self._set is None:
            return
        self._set.end()
        await asyncio.gather(*(asyncio.to_thread(drive.device.close) for drive in self._set.drives))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CLOSE_SECONDS
        while self._set.stats.in_flight and loop.time() < deadline:  # noqa: ASYNC110, the drives know no asyncio
            await asyncio.sleep(0.001)

    # Changes while running.

    async def add(self, directory: Path, weight: float = 1.0) -> DriveInfo:
        """Read from copies in this directory, too, from now on.

        A mirror in use is looked at anew: files that came since are read from, those that were replaced are opened
        again, and the weight is the new one. Its counters begin again. A mirror that was not there at the start has no
        more reads at a time than the deepest drive had then; `DriveInfo.probe` says so where that is fewer than it was
        measured to want.

        Raises:
            UsageError: nothing there can be used, or it is no mirror but a part of the store; the message says why.
            DriveError: a file cannot be opened.
            DeadlineExceeded: it is in use, and reads from its old files do not return.
        """
        async with self._changing:
            return await self._add(directory, weight)

    async def _add(self, directory: Path, weight: float) -> DriveInfo:
        if not directory.is_absolute():
            raise UsageError(f"{directory}: give the whole path", hint="The daemon's working directory is another one.")
        known = next((info for info in self.info.values() if info.directory == directory), None)
        if known is not None and known.part:
            raise UsageError(f"{directory} is a part of the store and in use already, as {known.name}")
        self._check_number(len(self.info) + (known is None))
        mirror = parse_mirror(f"{directory}={weight!r}")
        info = await asyncio.to_thread(self._admit, known.name if known else self._next_name(), mirror)
        if not info.shards:
            reasons = "; ".join(info.left_out) or "it holds none of the store's expert shards"
            raise UsageError(f"{directory} holds no copy of a shard of {self._store.path}: {reasons}")
        await asyncio.to_thread(self._measure, info)
        self._fit_spares(info)
        drive = await asyncio.to_thread(self._open, info, asyncio.get_running_loop())
        if known is not None:
            try:
                await self.remove(known.name)
            except TierdError:
                await asyncio.to_thread(drive.device.close)
                raise
        self._know(info)
        self.replicas.add(drive)
        _log.info("mirror added", drive=info.name, directory=str(directory), shards=len(info.shards))
        return info

    async def remove(self, name: str) -> DriveInfo:
        """Send no more reads to a drive, wait for those that it has begun, and close it.

        Args:
            name: of the drive, or its directory.

        Raises:
            UsageError: no such drive, the primary, or one with shards that no other drive has.
            DeadlineExceeded: its reads do not return; it leaves when they do.
        """
        info = next((i for i in self.info.values() if name in (i.name, str(i.directory))), None)
        if info is None or info.name == PRIMARY:
            raise UsageError(
                f"there is no mirror {name}", hint=f"The drives are {', '.join(self.info)}; {PRIMARY} stays."
            )
        if not info.shards:
            del self.info[info.name]
            return info
        if info.name not in self._retiring:
            drive = self.replicas.leave(info.name)
            self._retiring[info.name] = asyncio.ensure_future(self._retire(drive))
        try:
            async with asyncio.timeout(_REMOVE_SECONDS):
                await asyncio.shield(self._retiring[info.name])
        except TimeoutError:
            raise DeadlineExceeded(
                f"{info.name}: reads have not returned within {_REMOVE_SECONDS:g} s",
                hint="It gets no new ones, and leaves when they do.",
            ) from None
        return info

    async def _retire(self, drive: Drive) -> None:
        while drive.device.stats.in_flight:  # noqa: ASYNC110, the drives know no asyncio
            await asyncio.sleep(0.02)
        self.replicas.forget(drive)
        del self.info[drive.name]
        await asyncio.to_thread(drive.device.close)
        self._retiring.pop(drive.name, None)
        _log.info("mirror removed", drive=drive.name)

    def _fit_spares(self, info: DriveInfo) -> None:
        """The arena's spare slots were counted at the start: all that this drive may hang on to must fit."""
        most = max(1, self._spares - 1)
        if info.threads > most:
            found = info.threads
            info.threads = most
            info.probe = replace(
                info.probe,
                how=f"{info.probe.how}; {most} at a time until a start with --mirror, which counts spare slots for "
                f"{found}",
            )

    # Single drives.

    def _check_number(self, drives: int) -> None:
        if drives > _MAX_DRIVES:
            raise UsageError(f"{drives} drives are more than the {_MAX_DRIVES} that a daemon serves from")

    def _next_name(self) -> str:
        return next(name for n in count(1) if (name := f"mirror{n}") not in self.info)

    def _know(self, info: DriveInfo) -> None:
        for problem in info.left_out:
            _log.warning("file left out", drive=info.name, problem=problem)
        if not info.shards:
            _log.warning("drive left out: it has no shard to offer", drive=info.name, directory=str(info.directory))
        self.info[info.name] = info

    def _admit(self, name: str, mirror: Mirror) -> DriveInfo:
        copy = admit_copy(self._store, mirror.directory)
        return DriveInfo(name, mirror.directory, copy.paths, mirror.weight, copy.left_out)

    def _measure(self, info: DriveInfo) -> None:
        paths = [path for path in info.paths if path is not None]
        info.threads = self._threads or DEFAULT_DEPTH
        if not paths or (self._threads and len(self.info) == 1 and info.name in self.info):
            return
        throttle = self._throttle(info.name)
        record = self._store.geometry.slot_bytes
        try:
            key = probe_key(paths, self._store.fingerprint, record)
        except OSError as error:
            info.probe = DriveProbe(None, DEFAULT_DEPTH, f"not measured: {error.strerror}")
            return
        found = self._cache.load(key) if throttle is None else None
        if found is None:
            found = probe_drive(paths, record_bytes=record, wrapper=throttle)
            if throttle is None:
                self._cache.save(key, found)
        info.probe = found
        info.threads = self._threads or found.depth

    def _open(self, info: DriveInfo, loop: asyncio.AbstractEventLoop | None = None) -> Drive:
        loop = loop or asyncio.get_running_loop()
        wrappers: list[TransferWrapper] = []
        throttle = self._throttle(info.name)
        if throttle is not None:
            wrappers.append(throttle)
        if self.plan is not None:
            info.injector = FaultInjector(self.plan, info.name)
            wrappers.append(info.injector)
        device = FileDevice(
            info.name,
            info.paths,
            partial(loop.call_soon_threadsafe),
            threads=info.threads,
            direct=self._direct,
            close_timeout=_CLOSE_SECONDS,
            wrapper=Chain(wrappers),
        )
        device.on_read = self.on_read
        shards: Collection[int] = info.shards
        return Drive(device, shards, bandwidth=info.probe.bandwidth or DEFAULT_BANDWIDTH, weight=info.weight)

    def _throttle(self, name: str) -> Throttle | None:
        rule = self.plan.throttle(name) if self.plan is not None else None
        if rule is None:
            return None
        return Throttle(bytes_per_second=rule.bytes_per_second, latency=rule.latency)
