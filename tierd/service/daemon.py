"""The daemon: parts made in order, served until a signal, stopped in reverse order within a bound."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from tierd.addresses import Address, parse_address, runtime_directory
from tierd.api import admin_pb2
from tierd.arena.arena import Arena
from tierd.broker.broker import Broker
from tierd.broker.quota import SessionQuota
from tierd.broker.reading_ahead import PrefetchOptions
from tierd.errors import UsageError
from tierd.listening import check_local
from tierd.observe.activity import Activity
from tierd.observe.http import HttpServer, make_app
from tierd.observe.live import Live
from tierd.observe.live_series import StepCounter
from tierd.observe.metrics import DaemonMetrics, Watched
from tierd.observe.watched_policy import WatchedPolicy
from tierd.policy.policies import make_policy
from tierd.policy.waves import wave_size
from tierd.prefetch.history_guess import HistoryGuess
from tierd.prefetch.throttle import SECOND_WINDOW, Throttle
from tierd.rpc import plain_object
from tierd.service.admin_service import AdminService
from tierd.service.attaching import ArenaAttacher
from tierd.service.catalogue import StoreCatalogue
from tierd.service.drives import PRIMARY, Drives
from tierd.service.notify import Notifier
from tierd.service.ram import RamKeeper, arena_size, facts_of
from tierd.service.record_reader import RecordReader
from tierd.service.remembering import Remembering
from tierd.service.scrubbing import Scrubber
from tierd.service.servers import Servers
from tierd.service.session_service import SessionService
from tierd.service.statistics import statistics
from tierd.service.store_service import StoreService
from tierd.settings import PrefetchMode, ServeSettings
from tierd.sizes import parse_bytes
from tierd.store.store import ExpertStore

__all__ = ["RAM_TIER", "Daemon", "Running"]

_log = structlog.get_logger()

RAM_TIER = "ram"
DRIVE_TIER = PRIMARY

_LAG_SECONDS = 0.5
# A router's second choices are often right; beyond twice as many as it chooses, guesses waste more than they find.
_HINTED_PER_CHOSEN = 2


@dataclass(frozen=True, slots=True)
class Running:
    """What a started daemon says of itself."""

    address: Address
    local: Address | None
    http_url: str
    arena_bytes: int
    ram_bytes: int
    slots: int
    slot_bytes: int
    direct: bool
    drives: tuple[str, ...]


class Daemon:
    """One store, served. `startup`, then `wait`, then `shutdown`; `stop` may be called at any moment."""

    def __init__(self, store: ExpertStore, settings: ServeSettings) -> None:
        self._store = store
        self._settings = settings
        self._boot_id = secrets.token_bytes(16)
        self._servers = Servers(store.path, settings)
        self._http_address = None if settings.http == "off" else parse_address(settings.http, option="--http")
        if self._http_address is not None:
            if self._http_address.path is not None:
                raise UsageError("--http: a browser needs HOST:PORT, not a Unix socket")
            check_local(self._http_address, option="--http")
        # Wrong options are found before anything is made; the spare slots are known when the drives are.
        arena_size(settings, facts_of(store, settings, 0), store.manifest.dense_bytes)
        self._quota = _quota(settings)
        self._remembering = Remembering(store, settings, make_policy(settings.policy))
        self._stopping = asyncio.Event()
        self._notifier = Notifier()
        self._drain_seconds = settings.drain_seconds
        self._started = time.monotonic()
        self._closers: list[Callable[[], object]] = []
        self._ready = False

    async def startup(self) -> Running:
        """Make every part and begin to serve.

        Raises:
            UsageError: an option cannot be met.
            ArenaError: the shared memory cannot be had.
            DriveError: a shard cannot be opened.
        """
        try:
            return await self._startup()
        except BaseException:
            await self.shutdown()
            raise

    async def _startup(self) -> Running:
        store, settings, loop = self._store, self._settings, asyncio.get_running_loop()
        servers = self._servers
        self._closers.append(servers.close)
        servers.bind()
        self._drives = drives = Drives(store, settings)
        await drives.measure()
        facts = facts_of(store, settings, drives.spares)
        size = arena_size(settings, facts, store.manifest.dense_bytes)
        for line in size.lines:
            _log.info("memory", line=line)
        self._arena = arena = Arena.create(
            arena_bytes=size.slots * facts.slot_bytes,
            slot_bytes=store.geometry.slot_bytes,
            experts=store.geometry.experts_total,
            boot_id=self._boot_id,
            directory=settings.arena_dir,
            spares=drives.spares,
            growing=True,
        )
        self._closers.append(arena.close)
        self._activity = activity = Activity(store.geometry, loop.time)
        drives.on_read = activity.read_ended
        device = drives.open()
        self._closers.append(drives.close)
        attach_path = _attach_path(servers.local or servers.address)
        attacher = ArenaAttacher(attach_path, arena, store.geometry.experts_total, self._node_died)
        await self._remembering.load()
        self._broker = broker = Broker(
            catalogue=StoreCatalogue(store),
            memory=arena,
            policy=WatchedPolicy(self._remembering.policy, activity.evicted),
            device=device,
            clock=loop,
            max_experts_per_acquire=wave_size(arena.slots, store.geometry.top_k),
            sessions=attacher,
            prefetch=self._prefetch_options(),
            quota=self._quota,
            on_wait=activity.waited,
        )
        self._remembering.serve(broker)
        await attacher.start()
        self._closers.append(attacher.close)
        self._attacher = attacher
        self._sessions = SessionService(
            broker=broker,
            attacher=attacher,
            fingerprint=store.fingerprint,
            boot_id=self._boot_id.hex(),
            tiers=[RAM_TIER, DRIVE_TIER],
            drive_tier=1,
            max_sessions=settings.max_sessions,
            default_deadline=settings.deadline_seconds,
            watch=activity,
            door=servers.door,
        )
        self._ram = RamKeeper(
            store=store,
            facts=facts,
            size=size,
            arena=arena,
            broker=broker,
            end_sessions=self._sessions.end_sessions,
            steps=attacher.steps,
        )
        parts = Watched(
            broker,
            arena,
            drives,
            self._ram,
            self._remembering,
            activity,
            lambda: self._sessions.connected_and_admitted,
            StepCounter(attacher.steps),
        )
        self._metrics = DaemonMetrics(
            parts, fingerprint=store.fingerprint, policy=settings.policy, drive_tier=DRIVE_TIER
        )
        self._live = Live(store, parts, attacher, lambda: plain_object(self.stats()))
        self._add_services()
        await servers.start()
        self._closers.append(servers.stop)
        http_url = await self._start_http()
        self._closers.append(self._remembering.save)
        for watching in (self._watch_lag(), self._live.watch(), self._ram.watch(), self._remembering.watch()):
            self._closers.append(asyncio.ensure_future(watching).cancel)
        self._remembering.warm(arena.slots, drives.depth)
        self._ready = True
        # Before anybody is told that the daemon is up, and may ask it to stop.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        self._notifier.send("READY=1", f"STATUS=serving {store.path.name} from {arena.slots} slots")
        return Running(
            address=servers.address,
            local=servers.local,
            http_url=http_url,
            arena_bytes=arena.slots * arena.slot_bytes,
            ram_bytes=size.ram,
            slots=arena.slots,
            slot_bytes=arena.slot_bytes,
            direct=device.stats.direct,
            drives=drives.described(),
        )

    def _add_services(self) -> None:
        store, arena = self._store, self._arena

        def view(word: int, layer: int, expert: int) -> memoryview:
            return arena.record(word, store.location(layer, expert).nbytes)

        store_service = StoreService(
            store,
            RecordReader(self._broker, view),
            boot_id=self._boot_id.hex(),
            tiers=[RAM_TIER, DRIVE_TIER],
            slots=lambda: arena.slots,
            default_deadline=self._settings.deadline_seconds,
            door=self._servers.door,
        )
        admin = AdminService(
            self.stats,
            self.stop,
            self._drives,
            Scrubber(store, self._drives),
            self._ram,
            self._remembering,
            self._activity.recorder.dump,
        )
        self._servers.add(self._sessions, store_service, admin)

    async def _start_http(self) -> str:
        if self._http_address is None:
            return ""
        http = HttpServer(make_app(self._metrics.text, self._is_ready, self._live.stream), self._http_address)
        serving = asyncio.ensure_future(http.serve())

        async def stop() -> None:
            self._live.stream.close()
            http.stop()
            await serving

        self._closers.append(stop)
        return http.url

    async def wait(self) -> None:
        """Serve until `stop` or a signal; then drain within the bound."""
        loop = asyncio.get_running_loop()
        await self._servers.serving()
        await self._stopping.wait()
        self._ready = False
        self._notifier.send("STOPPING=1", "STATUS=answering what is in flight")
        await self._servers.stopping()
        self._sessions.drain("the daemon was asked to stop")
        deadline = loop.time() + self._drain_seconds
        while self._broker.pending() and loop.time() < deadline:  # noqa: ASYNC110, the broker knows no asyncio
            await asyncio.sleep(0.02)
        if self._broker.pending():
            _log.warning("stopping with requests unanswered", pending=self._broker.pending())

    async def shutdown(self) -> None:
        """Close everything that was opened, newest first; safe after a failed start.

        What cannot be closed keeps nothing else open, such as the history unsaved; its error comes at the end.
        """
        failures: list[Exception] = []
        while self._closers:
            try:
                closed = self._closers.pop()()
                if asyncio.iscoroutine(closed):
                    await closed
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        if failures:
            raise failures[0]

    def stop(self, within: float | None = None) -> None:
        """Ask for a graceful stop, within `within` seconds or the configured bound."""
        if within is not None:
            self._drain_seconds = min(within, self._settings.drain_seconds)
        self._stopping.set()

    def stats(self) -> admin_pb2.GetStatsResponse:
        """The counters as they are now."""
        return statistics(
            boot_id=self._boot_id.hex(),
            uptime_seconds=time.monotonic() - self._started,
            broker=self._broker,
            arena=self._arena,
            drives=self._drives,
            sessions=self._sessions.sessions.values(),
            attached=self._attacher.attached,
            ram=self._ram,
            remembering=self._remembering,
        )

    def _prefetch_options(self) -> PrefetchOptions:
        mode, guess, geometry = self._settings.prefetch, self._settings.guess, self._store.geometry
        guesses = None
        if PrefetchMode.OFF not in (mode, guess):
            layers = [entry.layer for entry in geometry.layers]
            guesses = HistoryGuess(layers, [entry.experts for entry in geometry.layers], geometry.top_k)
        return PrefetchOptions(
            depth=lambda: self._drives.depth,
            most_per_hint=_HINTED_PER_CHOSEN * geometry.top_k,
            throttle=Throttle(
                0 if mode is PrefetchMode.OFF else None, fixed=mode is not PrefetchMode.AUTO, window=SECOND_WINDOW
            ),
            guesses=guesses,
            # It is off until a trial has shown that it pays.
            guess_throttle=Throttle(0) if guess is PrefetchMode.AUTO else None,
        )

    def _node_died(self, session_id: int) -> None:
        self._sessions.node_died(session_id)

    def _is_ready(self) -> tuple[bool, str]:
        return self._ready, "" if self._ready else "the daemon is starting or stopping"

    async def _watch_lag(self) -> None:
        """Measure how late the loop is, and tell systemd that it turns."""
        loop = asyncio.get_running_loop()
        told = loop.time()
        while True:
            due = loop.time() + _LAG_SECONDS
            await asyncio.sleep(_LAG_SECONDS)
            now = loop.time()
            self._activity.lagged(max(0.0, now - due))
            interval = self._notifier.watchdog_seconds
            if interval is not None and now - told >= interval - _LAG_SECONDS:
                told = now
                self._notifier.send("WATCHDOG=1")


def _quota(settings: ServeSettings) -> SessionQuota:
    given = settings.session_read_bytes
    return SessionQuota(
        experts=settings.session_experts,
        read_bytes=parse_bytes(given, option="--session-read-bytes") if given else None,
        hints=settings.session_hints,
    )


def _attach_path(address: Address) -> Path:
    """The attach socket lies beside the gRPC socket; for a TCP address, in the runtime folder under the port."""
    if address.path is not None:
        return address.path.with_name(address.path.name + ".attach")
    return runtime_directory() / f"port-{address.port}.attach"
