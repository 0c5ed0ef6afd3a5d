"""Experts for a node on another host than its daemon: fetched as bytes, or computed by workers; the faster one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from tierd.access import LOCAL_ACCESS, Access
from tierd.addresses import Address, parse_target
from tierd.client.bytes_source import BytesSource
from tierd.client.loop_thread import LoopThread
from tierd.client.remote_store import RemoteStore
from tierd.client.source import Phase
from tierd.client.store_cache import StoreCache
from tierd.client.worker_source import WorkerSource
from tierd.errors import UsageError
from tierd.sizes import parse_bytes, parse_share
from tierd.state import cache_directory

__all__ = ["EXPERTS", "FarOptions", "open_far"]

EXPERTS = ("auto", "arena", "bytes", "worker")
"""How experts come from a daemon; see `FarOptions`."""

_DEFAULT_SHARE = "25%"
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FarOptions:
    """What a node on another host may be told.

    Attributes:
        experts: `arena`: the memory of a daemon on the same host; `bytes`: fetched into this node's RAM; `worker`:
            computed beside their store; `auto`: the first of these that is possible, between the last two the faster.
        workers: of the daemon's store, each HOST:PORT or HOST:PORT=WEIGHT; or, in place of an address, several equals
            of which one does the work, or @FILE, see `tierd.addresses.Address`.
        worker_seconds: after so long another one is asked for what a worker was asked for.
        store_cache: most bytes on this host's disk of what was fetched of stores; 0 keeps nothing.
        access: how daemon and workers are reached.
    """

    experts: str = "auto"
    workers: tuple[str, ...] = ()
    worker_seconds: float = 2.0
    store_cache: str = "16GiB"
    access: Access = LOCAL_ACCESS

    def check(self) -> None:
        """UsageError for options that do not go together."""
        if self.experts not in EXPERTS:
            raise UsageError(f"--experts {self.experts}: known are {', '.join(EXPERTS)}")
        if self.experts == "worker" and not self.workers:
            raise UsageError("--experts worker needs at least one --worker HOST:PORT")
        if self.workers and self.experts in ("arena", "bytes"):
            raise UsageError(f"--worker goes with --experts worker or auto, not with {self.experts}")
        if self.access.plaintext and (self.access.ca or self.access.certificate or self.access.name):
            raise UsageError("--plaintext goes without certificates: no --tls-ca, --tls-name or --tls-client-cert")


def open_far(
    address: Address,
    far: FarOptions,
    *,
    name: str,
    numerics: str,
    kernel_path: str,
    arena: str | None,
    patience: float,
    loop: LoopThread,
    tell: Callable[[str], None],
) -> BytesSource | WorkerSource:
    """A source for a node that cannot map the daemon's memory; see `tierd.client.open.open_source`.

    Raises:
        TierdError: nobody answers, or daemon, workers and node do not fit together.
    """
    limit = 0 if far.store_cache == "0" else parse_bytes(far.store_cache, option="--store-cache")
    folder = cache_directory() / "stores"
    store = RemoteStore(
        address, loop, far.access, cache=(lambda fingerprint: StoreCache(folder, limit, fingerprint)) if limit else None
    )
    store.checksum(0)  # fetches the index, so that the first record does not have to wait for it
    whole = store.manifest.geometry.experts_total * store.manifest.geometry.slot_bytes
    by_bytes = BytesSource(
        address,
        store,
        access=far.access,
        budget=parse_share(arena or _DEFAULT_SHARE, whole=whole, option="--arena"),
        patience=patience,
        loop=loop,
        tell=tell,
    )
    if not far.workers:
        return by_bytes
    try:
        by_worker = WorkerSource(
            [_parse_worker(text) for text in far.workers],
            by_bytes,
            access=far.access,
            name=name,
            numerics=numerics,
            kernel_path=kernel_path,
            patience=far.worker_seconds,
            loop=loop,
            tell=tell,
        )
    except BaseException:
        by_bytes.close()
        raise
    if far.experts == "worker":
        return by_worker
    try:
        worker, fetched = _seconds_of_a_layer(by_worker)
    except BaseException:
        by_worker.close()
        raise
    tell(
        f"a layer of a token takes {1000 * worker:.3g} ms by worker and {1000 * fetched:.3g} ms by bytes: "
        f"experts come by {'worker' if worker < fetched else 'bytes'}"
    )
    if worker < fetched:
        return by_worker
    by_worker.leave_workers()
    return by_bytes


def _parse_worker(text: str) -> tuple[Address, float]:
    """`HOST:PORT=WEIGHT`; UsageError for anything else."""
    place, _, weight = text.rpartition("=") if "=" in text else (text, "", "1")
    try:
        return parse_target(place, option="--worker"), float(weight)
    except ValueError:
        raise UsageError(f"--worker {text}: {weight!r} is no weight", hint="Such as HOST:PORT=2.") from None


def _seconds_of_a_layer(by_worker: WorkerSource) -> tuple[float, float]:
    """What the experts of a token take in a layer: computed by workers, and fetched as bytes as far as RAM lacks them.

    That a node's own RAM will hold no more than its share of the uses is the worst case; computing is left out of the
    second figure.
    """
    by_bytes, geometry = by_worker.by_bytes, by_worker.store.manifest.geometry
    entry, chosen = geometry.layers[0], geometry.top_k
    inputs = np.zeros((1, geometry.hidden_size), np.float32)
    outputs = np.zeros((1, chosen, geometry.hidden_size), np.float32)
    by_workers, fetched = [], []
    for turn in range(_TRIES + 1):
        numbers = [(turn * chosen + place) % entry.experts for place in range(chosen)]
        begun = time.perf_counter()
        by_worker.compute(entry.layer, np.array([numbers], np.int32), inputs, outputs, step=0, phase=Phase.DECODE)
        by_workers.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        by_bytes.visit(entry.layer, numbers, lambda _expert, _address: None, step=0, phase=Phase.DECODE)
        fetched.append(time.perf_counter() - begun)
    # The first of each pays for what happens once.
    lacking = 1 - min(1.0, by_bytes.slots / geometry.experts_total)
    by_worker.forget_counts()
    return median(by_workers[1:]), lacking * max(fetched[1:])
