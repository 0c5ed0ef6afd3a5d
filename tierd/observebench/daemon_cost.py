"""A real daemon of GLM-5.2's number of experts: how long a scrape takes, and what a page that is open costs it."""

from __future__ import annotations

import random
import socket
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from tierd.client.arena_source import ArenaSource
from tierd.client.private_daemon import PrivateDaemon
from tierd.client.source import Phase
from tierd.errors import DaemonUnavailable
from tierd.observe.recorder import FlightRecorder
from tierd.store.store import ExpertStore
from tierd.store.synthetic import make_store

__all__ = ["daemon_cost"]

_LAYERS: Final = 76
_EXPERTS: Final = 256
_TOP_K: Final = 8
_VISITS_PER_SECOND: Final = 300.0
"""About four tokens a second, which is what such a model does from two drives."""
_SEED: Final = 20
_NOTED: Final = 20_000


def daemon_cost(folder: Path, *, scrapes: int, pairs: int, seconds: float) -> dict[str, Any]:
    """Measure, while a client asks for experts at a steady rate.

    Args:
        folder: an empty one, for a store of some megabytes.
        scrapes: of /metrics, one after the other.
        pairs: of slices without and with a viewer; the daemon's work for the client is taken off in proportion.
        seconds: length of a slice.

    Returns:
        `scrape_seconds` and `viewer_core_share` as medians, with the raw values beside them; `series`; and
        `recorder_core_share`, the events that the flight recorder noted per second times what noting one takes.
    """
    store = make_store(folder / "store", layers=_LAYERS, experts=_EXPERTS, top_k=_TOP_K, fill="sparse")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    arena = str(store.geometry.experts_total // 4 * store.geometry.slot_bytes)
    options = ("--arena", arena, "--http", url.removeprefix("http://"), "--history", "off", "--log-level", "error")
    with ExitStack() as stack:
        daemon = PrivateDaemon(store.path, *options)
        stack.callback(daemon.stop)
        visits = stack.enter_context(_load(daemon, store))
        times = [_scrape(url) for _ in range(scrapes)]
        text = _exposition(url)
        shares = []
        noted, since = _events(text), time.monotonic()
        for number in range(pairs):
            # Every other pair begins with the viewer: what drifts, such as the share of hits, cancels out.
            if number % 2:
                with _viewer(url):
                    watched = _slice(daemon.pid, visits, seconds)
                alone = _slice(daemon.pid, visits, seconds)
            else:
                alone = _slice(daemon.pid, visits, seconds)
                with _viewer(url):
                    watched = _slice(daemon.pid, visits, seconds)
            shares.append(watched.share - alone.share * watched.visits / max(1, alone.visits))
        events_per_second = (_events(_exposition(url)) - noted) / (time.monotonic() - since)
    return {
        "scrape_seconds": statistics.median(times),
        "scrapes": times,
        "series": sum(1 for line in text.splitlines() if line and not line.startswith("#")),
        "viewer_core_share": statistics.median(shares),
        "viewer_core_shares": shares,
        "recorder_core_share": events_per_second * _seconds_to_note(),
    }


def _exposition(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:  # noqa: S310, our own address
        return str(answer.read().decode())


def _scrape(url: str) -> float:
    begun = time.perf_counter()
    _exposition(url)
    return time.perf_counter() - begun


def _events(text: str) -> float:
    """Events that the flight recorder has noted, by an exposition."""
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith("tierd_recorder_events_total ")))


def _seconds_to_note() -> float:
    """Processor seconds that the flight recorder takes for an event with three facts."""
    recorder = FlightRecorder(time.monotonic)
    begun = time.process_time()
    for number in range(_NOTED):
        recorder.span("drive", "read", 0.0, 1.0, ("layer", "expert", "bytes"), (number, number, number))
    return (time.process_time() - begun) / _NOTED


class _Slice(NamedTuple):
    """Share of a core that the daemon took, and what it did for the client meanwhile."""

    share: float
    visits: int


def _slice(pid: int, visits: list[int], seconds: float) -> _Slice:
    before, done, begun = _cpu_seconds(pid), visits[0], time.monotonic()
    time.sleep(seconds)
    return _Slice((_cpu_seconds(pid) - before) / (time.monotonic() - begun), visits[0] - done)


def _cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process, to the nanosecond (proc(5), schedstat)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9


@contextmanager
def _viewer(url: str) -> Iterator[None]:
    """A page's stream, read as it comes."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as stream:
        stream.sendall(f"GET /page/stream HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())

        def read() -> None:
            with suppress(OSError):
                while stream.recv(1 << 16):
                    pass

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        yield
        stream.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@contextmanager
def _load(daemon: PrivateDaemon, store: ExpertStore) -> Iterator[list[int]]:
    """A client that visits layer after layer at a steady rate; some experts far more often than others.

    Yields:
        One number, which rises with every visit.
    """
    visits = [0]
    source = _connect(daemon, store)
    ending = threading.Event()

    def ask() -> None:
        chance = random.Random(_SEED)  # noqa: S311, the same requests every time
        due = time.monotonic()
        step = 0
        while not ending.is_set():
            layer = step % _LAYERS
            chosen = {int(_EXPERTS * chance.random() ** 3) for _ in range(_TOP_K)}
            source.visit(layer, sorted(chosen), _look, step=1 + step // _LAYERS, phase=Phase.DECODE)
            step += 1
            visits[0] = step
            due = max(due + 1 / _VISITS_PER_SECOND, time.monotonic() - 1)
            time.sleep(max(0.0, due - time.monotonic()))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield visits
    finally:
        ending.set()
        thread.join(30)
        source.close()


def _connect(daemon: PrivateDaemon, store: ExpertStore) -> ArenaSource:
    until = time.monotonic() + 10
    while True:
        try:
            return ArenaSource(daemon.address, store, name="bench", numerics="none", kernel_path="none")
        except DaemonUnavailable:
            if time.monotonic() > until:
                raise


def _look(expert: int, address: int) -> None:
    """What a node would compute; here nothing."""
    del expert, address
