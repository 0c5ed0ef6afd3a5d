"""Nodes on other hosts: an address is all they need, and their tokens are those of a node beside the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
from daemons import PROMPT, eventually
from far import daemon, far_model, open_far, own_cache, tokens, worker_here

from compute_node.engine.arithmetic import ARITHMETIC
from compute_node.engine.kernel_path import kernel_path
from tierd.client.arena_source import ArenaSource
from tierd.client.bytes_source import BytesSource
from tierd.client.open import FarOptions, open_source
from tierd.client.source import Phase
from tierd.client.store_cache import StoreCache
from tierd.client.worker_source import WorkerSource
from tierd.errors import ChecksumMismatch, DaemonUnavailable, SessionRefused, UsageError

__all__ = ["daemon", "own_cache"]

HIDDEN = 'mount -t tmpfs none "$1" && test -z "$(ls -A "$1")" && shift && exec "$@"'


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_by_bytes_and_by_worker_a_far_node_says_what_a_near_one_says(daemon, embedded_store, reference, numerics):
    said = {}
    with ExitStack() as stack:
        workers = [stack.enter_context(worker_here(embedded_store, numerics=numerics)) for _ in range(2)]
        addresses = tuple(f"{worker.address}={weight}" for worker, weight in zip(workers, (1, 3), strict=True))
        for name, far in (
            ("arena", {"experts": "arena"}),
            ("bytes", {"arena": "10%"}),
            ("worker", {"experts": "worker", "workers": addresses}),
        ):
            with far_model(open_far(daemon.name, numerics=numerics, **far), numerics=numerics) as generator:
                said[name] = tokens(generator, 8)
                stats = generator.model.source.stats
                assert stats.requested == sum(stats.outcomes.values()) == generator.model.experts_chosen
        assert stats.tiers == {"worker": stats.requested}
        assert all(worker.computed > 20 for worker in workers)
        assert not any(worker.failed for worker in workers)
    assert said["bytes"] == said["worker"] == said["arena"]
    if numerics == "exact":
        assert said["arena"] == reference["token_ids"][:8]


def test_the_daemon_counts_what_a_node_by_bytes_counts(serve, embedded_store):
    daemon = serve(embedded_store, "--arena", "50%")
    with far_model(open_far(daemon.name, arena="20%")) as generator:
        tokens(generator, 8)
        stats, counted = generator.model.source.stats, daemon.stats()["requests"]
    asked = stats.requested - stats.tiers["node"]
    assert asked == counted["requests"] == counted["hits"] + counted["misses"] + counted["joined"]
    assert stats.outcomes["miss"] == counted["misses"]
    assert generator.model.source.bytes_received == asked * generator.model.source.store.manifest.geometry.slot_bytes


def test_a_far_node_in_a_mount_namespace_without_the_store_generates(daemon, embedded_store, reference):
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", HIDDEN, "sh", str(embedded_store)]
    tried = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no mount namespace can be made here: {tried.stderr.strip()}")
    node = [*words, sys.executable, "-m", "compute_node", "generate", daemon.name, "-p", PROMPT]
    options = ["--experts", "bytes", "--store-cache", "0", "--max-tokens", "12", "--ignore-eos", "--json"]
    done = subprocess.run(
        [*node, *options], capture_output=True, text=True, check=False, timeout=100, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["token_ids"] == reference["token_ids"][:12]
    assert said["tiers"]["nvme"] > 0


def test_a_port_of_this_host_whose_memory_is_out_of_reach_gives_bytes(daemon, monkeypatch):
    """As at the near end of a tunnel."""
    told = []
    near = open_far(daemon.name, experts="auto", told=told)
    assert isinstance(near, ArenaSource)
    near.close()

    def refuse(*_args, **_named):
        raise DaemonUnavailable("the daemon's attach socket cannot be used")

    monkeypatch.setattr("tierd.client.arena_source.attach", refuse)
    far = open_far(daemon.name, experts="auto", told=told)
    assert isinstance(far, BytesSource)
    far.close()
    assert "so experts come as bytes" in told[-1]


def test_auto_measures_and_says_what_it_takes(daemon, embedded_store):
    told = []
    with worker_here(embedded_store) as worker:
        source = open_far(daemon.name, experts="auto", workers=(str(worker.address),), arena="10%", told=told)
        assert isinstance(source, WorkerSource | BytesSource)
        assert ("by worker" in told[-1].rpartition(":")[2]) == isinstance(source, WorkerSource)
        assert source.stats.requested == 0
        source.close()
        eventually(lambda: not worker._service.nodes)


def test_what_was_fetched_is_kept_and_checked(daemon, tmp_path):
    first = open_far(daemon.name)
    names = [info.name for info in first.store.manifest.dense if not info.name.endswith(".scales")][:3]
    texts = [file.name for file in first.store.manifest.files]
    tensors = [first.store.read_dense(name).data.copy() for name in names]
    files = [first.store.read_file(name) for name in texts]
    first.close()
    folder = tmp_path / "cache" / "stores" / first.store.fingerprint
    kept = sorted(folder.iterdir())
    assert len(kept) >= len(names) + len(texts) + 1
    assert not [path for path in kept if path.name.startswith("fetching")]
    # One is damaged, one cut short, one is gone: they are fetched again, the others are not.
    kept[0].write_bytes(bytes(len(kept[0].read_bytes())))
    kept[1].write_bytes(kept[1].read_bytes()[:-1])
    kept[2].unlink()
    again = open_far(daemon.name)
    fetched = []
    read = again.store._read
    again.store._read = lambda name, *rest: fetched.append(name) or read(name, *rest)
    assert [again.store.read_dense(name).data.tobytes() for name in names] == [data.tobytes() for data in tensors]
    assert [again.store.read_file(name) for name in texts] == files
    assert len(fetched) <= 3
    again.close()


def test_the_cache_of_stores_is_bounded_and_drops_what_was_not_used_for_longest(tmp_path):
    for number, name in enumerate("abc"):
        cache = StoreCache(tmp_path, 100, name * 64)
        cache.keep("x", bytes(40))
        folder = tmp_path / (name * 64)
        assert folder.exists()
        os.utime(folder, (number, number))
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["b", "c"]
    cache = StoreCache(tmp_path, 100, "c" * 64)
    cache.keep("y", bytes(90))  # beside x it is more than all may be
    assert cache.read("y", 90) is None
    assert cache.read("x", 40).tobytes() == bytes(40)
    assert cache.read("x", 41) is None
    no_place = tmp_path / "file"
    no_place.write_bytes(b"")
    StoreCache(no_place, 100, "d" * 64).keep("x", bytes(4))  # what cannot be kept is not an error


def test_wrong_bytes_from_the_daemon_are_an_error(daemon, monkeypatch):
    source = open_far(daemon.name)
    right = source.store.checksum
    monkeypatch.setattr(source.store, "checksum", lambda flat: right(flat) ^ (flat == 3))
    with pytest.raises(ChecksumMismatch, match="layer 0 expert 3"):
        source.visit(0, [1, 3], lambda *_: None, step=0, phase=Phase.DECODE)
    source.close()


@pytest.mark.parametrize(
    ("how", "theirs", "ours"),
    [
        ({"fingerprint": "ab" * 32}, "abababababab", "{own}"),
        ({"path": "sse9"}, "sse9", "{path}"),
        ({"numerics": "fast"}, "fast", "exact"),
        ({"arithmetic": "00000000"}, "exact 00000000", f"exact {ARITHMETIC}"),
    ],
    ids=["store", "kernel path", "numerics", "order of sums"],
)
def test_a_worker_that_would_compute_other_bits_is_refused_with_both_sides_named(
    daemon, embedded_store, how, theirs, ours
):
    with worker_here(embedded_store, **how) as worker:
        with pytest.raises(SessionRefused) as refused:
            open_far(daemon.name, experts="worker", workers=(str(worker.address),))
        own = daemon_fingerprint(daemon)[:12]
        assert theirs in refused.value.message
        assert ours.format(own=own, path=kernel_path()) in refused.value.message


def daemon_fingerprint(daemon):
    source = open_far(daemon.name)
    source.close()
    return source.store.fingerprint


def test_options_that_do_not_go_together_are_refused(daemon, embedded_store):
    for store, named in (
        (daemon.name, {"experts": "worker"}),
        (daemon.name, {"experts": "magic"}),
        (daemon.name, {"experts": "bytes", "workers": ("127.0.0.1:1",)}),
        (daemon.name, {"experts": "worker", "workers": ("127.0.0.1:1=x",)}),
        (daemon.name, {"experts": "worker", "workers": ("127.0.0.1:1", "127.0.0.1:1")}),
        (embedded_store, {"experts": "bytes"}),
    ):
        with pytest.raises(UsageError):
            open_far(store, **named)
    with pytest.raises(DaemonUnavailable, match="no worker answers"):
        open_far(daemon.name, experts="worker", workers=("127.0.0.1:1",))
    with pytest.raises(UsageError, match="--arena"):
        open_source(
            daemon.name, name="x", numerics="exact", kernel_path="x", arena="10%", far=FarOptions(experts="arena")
        )
